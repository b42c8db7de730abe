"""Metrics of the weight store; listed in ``docs/metrics.md``."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_RUN = ("run",)

HEAD_SEQUENCE = Gauge(
    "rose_weights_head_sequence", "Sequence of a run's head.", _RUN, registry=REGISTRY
)
HEAD_INCARNATION = Gauge(
    "rose_weights_head_incarnation", "Incarnation of a run's head.", _RUN, registry=REGISTRY
)
COMMITS = Counter(
    "rose_weights_commits_total",
    "Commits by outcome: Published, or the error's name.",
    (*_RUN, "outcome"),
    registry=REGISTRY,
)
CHANGED_RATIO = Gauge(
    "rose_weights_changed_ratio", "Share of elements the head changed.", _RUN, registry=REGISTRY
)
DELTA_BYTES = Counter(
    "rose_weights_published_bytes_total", "Bytes of published blocks.", _RUN, registry=REGISTRY
)
RECEIVED_BYTES = Counter(
    "rose_weights_received_bytes_total", "Bytes of blocks received.", registry=REGISTRY
)
SENT_BYTES = Counter("rose_weights_sent_bytes_total", "Bytes of blocks sent.", registry=REGISTRY)
PLANS = Counter(
    "rose_weights_plans_total",
    "Plans by kind: Same, Delta (one version), Merged (several), Full.",
    (*_RUN, "kind"),
    registry=REGISTRY,
)
PLAN_SECONDS = Histogram(
    "rose_weights_plan_seconds",
    "Time to answer a plan, merging included.",
    registry=REGISTRY,
    buckets=(0.001, 0.01, 0.1, 1, 10, 60),
)
RELAY_MERGES = Counter(
    "rose_weights_relay_merges_total",
    "Plans over several versions that a relay made from deltas it held.",
    registry=REGISTRY,
)
FREED_BYTES = Counter(
    "rose_weights_freed_bytes_total", "Bytes removed by retention.", registry=REGISTRY
)
REFUSALS = Counter(
    "rose_weights_refusals_total",
    "Calls refused, by the error's name.",
    ("error",),
    registry=REGISTRY,
)
