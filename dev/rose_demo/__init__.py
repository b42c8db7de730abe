"""The main job on real parts, with a live table and a report; see ``rose demo --help``."""
