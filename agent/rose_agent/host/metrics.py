"""Metrics of the engine host and of weight-sync, on the agent's registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from rose_agent.metrics import REGISTRY
from rose_core.host_reasons import HostReason

PERMIT_LAPSES = Counter(
    "rose_host_permit_lapses",
    "Times a permit closed or lapsed while the engine was allowed to run.",
    registry=REGISTRY,
)
STOP_SECONDS = Histogram(
    "rose_host_stop_seconds",
    "From the decision to stop an engine until every process of it stood still.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
    registry=REGISTRY,
)
GROUP_ERRORS = Counter(
    "rose_host_group_errors",
    "Failed attempts to freeze, thaw or kill an engine's process tree.",
    registry=REGISTRY,
)
KILLED = Counter(
    "rose_host_killed_engines",
    "Engines that the host killed, by reason.",
    ["reason"],
    registry=REGISTRY,
)


def count_kill(reason: HostReason) -> None:
    """Count an engine that the host ends."""
    KILLED.labels(reason=reason.value).inc()


RESTARTS = Counter(
    "rose_host_engine_restarts",
    "Engines started again after they ended by themselves.",
    registry=REGISTRY,
)
ENGINES = Gauge(
    "rose_host_engines",
    "Engines of this host by state.",
    ["state"],
    registry=REGISTRY,
)
START_SECONDS = Histogram(
    "rose_host_engine_start_seconds",
    "From the start of an engine's process until it answered that it is ready.",
    buckets=(1, 5, 10, 20, 40, 60, 90, 120, 300, 600),
    registry=REGISTRY,
)
GENERATED_TOKENS = Counter(
    "rose_host_generated_tokens",
    "Output tokens that passed the data routes.",
    registry=REGISTRY,
)
PROXY_REQUESTS = Counter(
    "rose_host_proxy_requests",
    "Requests to the data routes by outcome.",
    ["outcome"],
    registry=REGISTRY,
)
PROXY_LIVE = Gauge(
    "rose_host_proxy_live_requests",
    "Requests in flight on the data routes.",
    registry=REGISTRY,
)
DORMANCY = Counter(
    "rose_host_dormancy",
    "Orders to release memory or to take it back, by outcome.",
    ["outcome"],
    registry=REGISTRY,
)
RELEASE_SECONDS = Histogram(
    "rose_host_release_seconds",
    "From the order to release an engine's memory until it was measured again.",
    buckets=(0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 4),
    registry=REGISTRY,
)
ACTIVATION_SECONDS = Histogram(
    "rose_host_activation_seconds",
    "From the order that activated a dormant engine until it could compute.",
    buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 120),
    registry=REGISTRY,
)
RELEASED_BYTES = Counter(
    "rose_host_released_bytes",
    "Memory that engines let go of when they became dormant, as measured.",
    registry=REGISTRY,
)
KV_STORE_BYTES = Gauge(
    "rose_host_kv_store_bytes",
    "Keys that engines of leases keep for each other in this node's memory.",
    registry=REGISTRY,
)
KV_POOL_ENGINES = Gauge(
    "rose_host_kv_pool_engines",
    "Engines that are told of the platform's pool of keys.",
    registry=REGISTRY,
)
KV_POOL_JOINED = Gauge(
    "rose_host_kv_pool_joined_engines",
    "Engines that can ask the platform's pool of keys now, by their last answer.",
    registry=REGISTRY,
)
KV_POOL_BYTES = Counter(
    "rose_host_kv_pool_bytes",
    "Keys that engines pulled from the platform's pool or wrote to it, or had to drop: too many "
    "waited to be written.",
    ["what"],
    registry=REGISTRY,
)
KV_POOL_PULL_SECONDS = Counter(
    "rose_host_kv_pool_pull_seconds",
    "Time that pulls from the platform's pool took, those to measure it among them.",
    registry=REGISTRY,
)
KV_POOL_LATE = Counter(
    "rose_host_kv_pool_late_orders",
    "Answers of the platform's pool that came too late to be waited for.",
    registry=REGISTRY,
)
KV_POOL_FAILURES = Counter(
    "rose_host_kv_pool_failures",
    "Times that an engine left the platform's pool alone for a while, because it did not work.",
    registry=REGISTRY,
)
RESIDUE_BYTES = Gauge(
    "rose_host_residue_bytes",
    "Memory that dormant engines still hold, as measured.",
    registry=REGISTRY,
)
