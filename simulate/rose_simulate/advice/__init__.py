"""What a pool's own recorded load says about lending it: before anybody is trusted with it. Pure.

- ``telemetry``: rows and Prometheus answers as one series of loads; what is wrong with them.
- ``estimate``: lendable GPU-hours and exposed requests, with intervals.
- ``recommend``: the limits to begin with, as a ServingPool.
- ``memory``: what serving's memory setting makes lendable, and its price.

``docs/advisor.md`` derives every figure. The shell, which reads files, is
``rose_simulate.verbs.advise`` and ``rose_simulate.verbs.advise_memory``.
"""
