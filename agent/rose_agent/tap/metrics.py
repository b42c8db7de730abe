"""Metrics of the wire tap, on the agent's registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from rose_agent.metrics import REGISTRY

SEGMENTS = Counter(
    "rose_tap_segments", "TCP segments that the kernel filters let pass.", registry=REGISTRY
)
DROPPED = Counter(
    "rose_tap_dropped_segments",
    "Segments the kernel dropped because the tap was too slow; each makes the state unknown.",
    registry=REGISTRY,
)
REQUESTS = Counter("rose_tap_requests", "Generating requests seen to arrive.", registry=REGISTRY)
LAG_SECONDS = Histogram(
    "rose_tap_lag_seconds",
    "From the kernel's stamp of a request's first segment to its event, where it is told at once.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0),
    registry=REGISTRY,
)
REPLICAS = Gauge("rose_tap_replicas", "Serving replicas that are followed.", registry=REGISTRY)
COUNTING = Gauge(
    "rose_tap_counted_replicas",
    "Replicas whose tokens a program in the kernel counts; of the others the log says why not.",
    registry=REGISTRY,
)
COUNTED = Counter(
    "rose_tap_counted_tokens", "Tokens that the kernel counted for the tap.", registry=REGISTRY
)
NOT_ENTRUSTED = Counter(
    "rose_tap_not_entrusted",
    "Times that a stream stayed with the reader because the kernel's map was full.",
    registry=REGISTRY,
)
SAMPLING = Gauge(
    "rose_tap_sampled_replicas",
    "Replicas whose response segments are sampled by the kernel now.",
    registry=REGISTRY,
)
