"""The operator at fleet scale: a real API server, agents over real gRPC.

- ``fleet``: what the fleet looks like, as objects and as agents' reports.
- ``machines``: its nodes and serving pods on the API server, by KWOK.
- ``agents``: a process full of agents; ``python -m bench.operator.agents``.
- ``node``: guard and tap of one node with eight replicas, apart from the rest.
- ``passes``: processor time of a pass, without an API server.
- ``profiled``: an operator under a profiler, for ``--profile FILE``.
- ``processes``: operators and agents as children, and what their pages and /proc say.
- ``__main__``: an API server, KWOK, two operators; what is done to the fleet, and its figures.
"""
