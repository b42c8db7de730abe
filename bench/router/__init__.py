"""What the router costs: turns per second, and the latency it adds to streams.

``python -m bench.router`` runs a stub engine that answers at once (or at a set pace), the router
and, where it is installed, sglang-router as processes of their own, and asks each the same.
"""
