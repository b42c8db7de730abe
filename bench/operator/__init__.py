"""The operator at fleet scale: a real API server, agents over real gRPC.

- ``fleet``: what the fleet looks like, as objects and as agents' reports.
- ``agents``: a process full of agents; ``python -m bench.operator.agents``.
- ``profiled``: an operator under a profiler, for ``--profile FILE``.
- ``processes``: operators and agents as children, and what their pages and /proc say.
- ``__main__``: the phases, in the order in which they run.
"""
