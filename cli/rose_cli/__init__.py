"""The one command line ``rose``: a verb per process and per task."""
