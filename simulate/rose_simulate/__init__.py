"""The simulator: serving and rollouts on virtual time; what a pool's load says about lending.

- ``model``: the virtual world; pure. ``advice``: what recorded load makes lendable; pure.
- ``main``: the verb ``rose simulate``. ``reading``: YAML and CSV, with file, line and field.
- ``study``: regimes, seeds and derates of one scenario; the tables.
"""
