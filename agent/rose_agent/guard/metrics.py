"""Metrics of the guard, on the agent's registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from rose_agent.metrics import REGISTRY

_FAST = (0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)

CLOSE_SECONDS = Histogram(
    "rose_guard_arrival_to_close_seconds",
    "From a request's first segment (kernel's stamp) to the closed permit.",
    buckets=_FAST,
    registry=REGISTRY,
)
STOP_SECONDS = Histogram(
    "rose_guard_arrival_to_stop_seconds",
    "From a request's first segment to the engine host's word that every thread stands still.",
    buckets=_FAST,
    registry=REGISTRY,
)
GATE_OPEN = Gauge(
    "rose_guard_gate_open", "1 while the slot's gate is open.", ["slot"], registry=REGISTRY
)
GATE_CHANGES = Counter(
    "rose_guard_gate_changes",
    "Changes of a gate's position by the reason of the new one.",
    ["reason"],
    registry=REGISTRY,
)
RUNGS = Counter(
    "rose_guard_rungs", "Rungs of the reclaim ladder entered.", ["rung"], registry=REGISTRY
)
ORDERS = Counter("rose_guard_orders", "Orders carried out by kind.", ["order"], registry=REGISTRY)
OPEN_SECONDS = Counter(
    "rose_guard_open_seconds", "Time with an open gate, all slots.", registry=REGISTRY
)
LENT_SECONDS = Counter(
    "rose_guard_lent_seconds", "Time with a granted slot, all slots.", registry=REGISTRY
)
SERVING_REQUESTS = Counter(
    "rose_guard_serving_requests",
    "Finished serving requests by pool and whether they met the pool's SLO.",
    ["pool", "met"],
    registry=REGISTRY,
)
TTFT_SECONDS = Histogram(
    "rose_guard_serving_ttft_seconds",
    "Time to first token of serving requests as the tap saw it, by window class.",
    ["pool", "window"],
    buckets=_LATENCY,
    registry=REGISTRY,
)
TPOT_SECONDS = Histogram(
    "rose_guard_serving_tpot_seconds",
    "Mean time per output token of serving requests as the tap saw it, by window class.",
    ["pool", "window"],
    buckets=tuple(b / 10 for b in _LATENCY),
    registry=REGISTRY,
)
SIGNAL_KNOWN = Gauge(
    "rose_guard_signal_known",
    "1 while the replica's state is known, 0 while it is unknown (gate closed).",
    ["pod"],
    registry=REGISTRY,
)
VERIFIED = Gauge(
    "rose_guard_signal_verified",
    "1 while the tap's request count equals the engine's own.",
    ["pod"],
    registry=REGISTRY,
)
MISSED_REQUESTS = Counter(
    "rose_guard_missed_requests",
    "Requests the engine counted and the tap did not.",
    ["pod"],
    registry=REGISTRY,
)
TICK_SECONDS = Histogram(
    "rose_guard_tick_seconds",
    "Duration of one round of the guard.",
    buckets=_FAST,
    registry=REGISTRY,
)
SYNCS = Counter(
    "rose_guard_syncs", "Sync calls to the operator by outcome.", ["outcome"], registry=REGISTRY
)
HIGHEST_TERM = Gauge(
    "rose_guard_highest_term", "Highest leader term this node has obeyed.", registry=REGISTRY
)
ATTACHES = Counter(
    "rose_guard_attaches", "Streams to routers by outcome.", ["outcome"], registry=REGISTRY
)
API_ERRORS = Counter(
    "rose_guard_kubernetes_errors",
    "Failed lists and watches of this node's pods.",
    registry=REGISTRY,
)
