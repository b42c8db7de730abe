"""Serving and rollouts on virtual time, with the decisions that production imports. Pure; no I/O.

- ``run``, ``outcome``: a world run to its end, and what it gave.
- ``simulation``: one run of single events. ``fleets``: thousands of GPUs in bins.
- ``cluster``: replicas, machines, the planner (asks ``rose_core.lending``).
- ``jobs``: what arrives, and the trainer. ``regimes``: what each regime is made of.
- ``routing``: asks ``rose_core.rollouts``.
- ``gpus``: engines, devices, and the gates; ``guarded`` asks ``rose_core.guard``.
- ``scenarios``: what is told. ``clock``: events in order.

Read ``run`` first. The shell, which reads files, stands one floor above.
"""
