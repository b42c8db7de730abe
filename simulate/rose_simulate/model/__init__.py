"""Serving and rollouts on virtual time, with the decisions that production imports. Pure; no I/O.

- ``clock``: events in order. ``costs``: measured times. ``batch``: an engine that batches.
- ``device``: two engines on one replica's GPUs; interference, modelled.
- ``gates``, ``guarded``, ``paper``: who lets rollouts work; ``guarded`` asks ``rose_core.guard``.
- ``router``: calls ``rose_core.rollouts``. ``planner``: calls ``rose_core.lending``.
- ``workload``, ``job``: what arrives, and the trainer.
- ``curves``, ``fleet``: thousands of GPUs in bins, from what one replica does event by event.
- ``scenario``, ``fleet_scenario``: what is told.
- ``simulation``, ``run``, ``outcome``: one run and what it gave.

Read ``run`` first. The shell, which reads files, stands one floor above.
"""
