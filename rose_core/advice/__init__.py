"""What a pool's own recorded load says about lending it: before anybody is trusted with it. Pure.

- ``telemetry``: rows and Prometheus answers as one series of loads; what is wrong with them.
- ``estimate``: lendable GPU-hours and exposed requests, with intervals.
- ``recommend``: the limits to begin with, as a ServingPool.

``docs/advisor.md`` derives every figure. The shell, which reads files, is ``rose_simulate.advise``.
"""
