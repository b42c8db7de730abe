"""Metrics of the trainer library; serve them with ``rose_wire.observability.pages``."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_SECONDS = (0.001, 0.01, 0.1, 0.5, 1, 5, 20, 60, 300)

STALL_SECONDS = Histogram(
    "rose_publisher_stall_seconds",
    "Time the trainer stood still in publish(): waiting for a buffer, and the snapshot.",
    registry=REGISTRY,
    buckets=_SECONDS,
)
ENCODE_SECONDS = Histogram(
    "rose_publisher_encode_seconds",
    "Time to compare and encode a version, in the background.",
    registry=REGISTRY,
    buckets=_SECONDS,
)
SEND_SECONDS = Histogram(
    "rose_publisher_send_seconds",
    "Time until the store held a version durably, in the background.",
    registry=REGISTRY,
    buckets=_SECONDS,
)
CHANGED_RATIO = Gauge(
    "rose_publisher_changed_ratio", "Share of elements the last version changed.", registry=REGISTRY
)
BYTES = Counter("rose_publisher_bytes_total", "Bytes of blocks published.", registry=REGISTRY)
VERSIONS = Counter("rose_publisher_versions_total", "Versions published.", registry=REGISTRY)
CONSUMED_AGE = Histogram(
    "rose_publisher_consumed_age_versions",
    "Publishes between a trajectory's oldest version and its consumption.",
    registry=REGISTRY,
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
)
STALE = Counter(
    "rose_publisher_consumed_stale_total",
    "Trajectories consumed that were older than allowed, or of a version nobody remembers.",
    registry=REGISTRY,
)
WAITING = Gauge(
    "rose_publisher_waiting_versions", "Versions taken but not yet durable.", registry=REGISTRY
)
