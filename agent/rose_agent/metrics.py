"""The registry of every process that runs on serving nodes.

Each room declares its own in its ``metrics`` module; here is what the guard's lower rooms count.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

REGISTRY = CollectorRegistry()
READER_ENDS = Counter(
    "rose_guard_reader_ends",
    "Processes that read a serving replica and ended while it was there; each is started anew.",
    registry=REGISTRY,
)
API_ERRORS = Counter(
    "rose_guard_kubernetes_errors",
    "Failed lists and watches of this node's pods.",
    registry=REGISTRY,
)
