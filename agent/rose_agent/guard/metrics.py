"""Metrics of the guard, on the agent's registry."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

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
    "From a request's first segment to the engine host's report that every thread stands still; to "
    "the gate that opened again, where that came first.",
    buckets=_FAST,
    registry=REGISTRY,
)
DEVICE_ACCESS = Gauge(
    "rose_guard_device_access",
    "1 for what the guard found of the node's GPUs: Found, NoGpu, NoDriver, NoAccess, NvmlFails.",
    ["state"],
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
LEADER_LEASE_AGE = Gauge(
    "rose_guard_leader_word_age_seconds",
    "Age of the last word of the guard whose gate this follower's gate follows.",
    ["replica"],
    registry=REGISTRY,
)
SERVING_ASLEEP = Gauge(
    "rose_guard_serving_asleep",
    "1 while the serving replica sleeps because it is lent whole.",
    ["replica"],
    registry=REGISTRY,
)
SERVING_WAKING = Gauge(
    "rose_guard_serving_waking",
    "1 while a serving replica that was lent whole is on its way back and does not serve yet.",
    ["replica"],
    registry=REGISTRY,
)
WHOLE_PHASES = Counter(
    "rose_guard_whole_phases",
    "Phases of whole-replica loans entered, and the reason of the failure that led there.",
    ["phase", "reason"],
    registry=REGISTRY,
)
OPEN_SECONDS = Counter(
    "rose_guard_open_seconds", "GPU time with an open gate, all slots.", registry=REGISTRY
)
LENT_SECONDS = Counter(
    "rose_guard_lent_seconds", "GPU time with a granted slot, all slots.", registry=REGISTRY
)
SERVING_REQUESTS = Counter(
    "rose_guard_serving_requests",
    "Finished serving requests by pool and whether they met the pool's SLO.",
    ["pool", "met"],
    registry=REGISTRY,
)
EXPOSED_MISSES = Counter(
    "rose_guard_serving_exposed_misses",
    "Finished serving requests that missed the pool's SLO and had met an open gate.",
    ["pool"],
    registry=REGISTRY,
)
CERTIFIED_REQUESTS = Counter(
    "rose_guard_certified_requests",
    "Requests that met an empty replica and an open gate under a certificate, and whether their "
    "TTFT exceeded what it promised.",
    ["pool", "exceeded"],
    registry=REGISTRY,
)
CERTIFICATE_SECONDS = Gauge(
    "rose_guard_certificate_seconds",
    "TTFT that the next request on an empty replica is promised: its own (part next) and what "
    "lending may add (part stop).",
    ["pool", "part"],
    registry=REGISTRY,
)
CERTIFICATE_HOLDS = Gauge(
    "rose_guard_certificate_holds",
    "1 while that fits into the pool's TTFT, 0 while gates on empty replicas stay shut for it.",
    ["pool"],
    registry=REGISTRY,
)
ADDED_MISSES = Gauge(
    "rose_guard_added_misses_most",
    "Most of the pool's lent busy periods on this node in which a request missed its SLO because "
    "of lending; holds at every look at once, 95 %.",
    ["pool"],
    registry=REGISTRY,
)
TRIAL_PERIODS = Gauge(
    "rose_guard_trial_busy_periods",
    "Busy periods of lent cycles that this speaks of, compared with those of withheld cycles.",
    ["pool"],
    registry=REGISTRY,
)
TRIAL_OUTCOMES = Counter(
    "rose_guard_trial_outcomes",
    "Finished serving requests on replicas with a lent GPU, each within one cycle of a pool that "
    "withholds some: by the cycle's class, and whether they met the pool's SLO.",
    ["pool", "window", "met"],
    registry=REGISTRY,
)
ALLOWED_MISSES = Gauge(
    "rose_guard_serving_allowed_misses_ratio",
    "Share of a pool's requests that its objective allows to miss: 1 - slo.percentile / 100.",
    ["pool"],
    registry=REGISTRY,
)
BREAKER_TRIPS = Counter(
    "rose_guard_breaker_trips",
    "Times a pool's breaker has opened, by cause (error-budget, latency-increase).",
    ["pool", "cause"],
    registry=REGISTRY,
)
ERROR_BUDGET_BURN = Gauge(
    "rose_guard_error_budget_burn",
    "Slow requests of a pool on this node over 5 minutes / what its percentile allows.",
    ["pool"],
    registry=REGISTRY,
)
BREACH_DUMPS = Counter(
    "rose_guard_breach_dumps",
    "Flight recorder dumps written because of a breach, by what happened.",
    ["outcome"],
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
COMPUTE_SHARE = Gauge(
    "rose_guard_compute_share",
    "Share of the last second in which rollouts could compute, for pools with maxComputePercent.",
    ["pod"],
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
ENROLMENTS = Counter(
    "rose_guard_enrolments",
    "Certificates asked of the operator for this node, by outcome.",
    ["outcome"],
    registry=REGISTRY,
)
HIGHEST_TERM = Gauge(
    "rose_guard_highest_term", "Highest leader term this node has obeyed.", registry=REGISTRY
)
ATTACHES = Counter(
    "rose_guard_attaches", "Streams to routers by outcome.", ["outcome"], registry=REGISTRY
)
REPLICA_BUSY_SECONDS = Counter(
    "rose_guard_replica_busy_seconds",
    "Time with a serving request under way, by the tap or else the engine; for `rose advise`.",
    ["pool", "replica"],
    registry=REGISTRY,
)
REPLICA_KNOWN_SECONDS = Counter(
    "rose_guard_replica_known_seconds",
    "Time of which it is known whether a serving request was under way.",
    ["pool", "replica"],
    registry=REGISTRY,
)


M = TypeVar("M", Counter, Histogram)


@lru_cache(maxsize=1024)  # pools of a node, each with a few labels more
def child(metric: M, *labels: str) -> M:
    """The metric with these labels, for series that are never removed and moved by each request."""
    return metric.labels(*labels)


class BusyMetrics:
    """Busy and known time of each replica, in any mode; replicas that are gone are removed."""

    def __init__(self) -> None:
        self._names: set[tuple[str, str]] = set()

    def add(self, pool: str, replica: str, busy_s: float, known_s: float) -> None:
        """Add the time since the last look, seconds.

        Args:
            pool: of the replica.
            replica: its pod's name.
            busy_s: of which a request was under way; counts up to ``known_s``.
            known_s: of which that was known.
        """
        self._names.add((pool, replica))
        REPLICA_BUSY_SECONDS.labels(pool, replica).inc(min(max(0.0, busy_s), known_s))
        REPLICA_KNOWN_SECONDS.labels(pool, replica).inc(known_s)

    def keep(self, names: set[tuple[str, str]]) -> None:
        """Remove every (pool, replica) but these."""
        for name in self._names - names:
            REPLICA_BUSY_SECONDS.remove(*name)
            REPLICA_KNOWN_SECONDS.remove(*name)
        self._names &= names


OBSERVED = BusyMetrics()
