"""The simulator: serving and rollouts on virtual time; what a pool's load says about lending.

- ``model``: the virtual world; pure. ``advice``: what recorded load makes lendable; pure.
- ``main``: the verb ``rose simulate``. ``verbs``: its parts, ``rose advise`` and ``rose cost``.
- ``pages``: plots. ``runs``: regimes, seeds and derates of one scenario. ``files``: what is read.
"""
