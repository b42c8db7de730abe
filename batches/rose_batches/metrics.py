"""Metrics of batches."""

from prometheus_client import CollectorRegistry, Counter, Gauge

REGISTRY = CollectorRegistry()

LINES = Counter(
    "rose_batches_lines_total",
    "Lines of batches that ended, by outcome: answered, failed or expired.",
    ["outcome"],
    registry=REGISTRY,
)
for _outcome in ("answered", "failed", "expired"):
    LINES.labels(_outcome)
TRIES = Counter(
    "rose_batches_tries_total",
    "Requests that were sent to the router for lines; more than lines: some were tried again.",
    registry=REGISTRY,
)
ENDED = Counter(
    "rose_batches_ended_total",
    "Batches that ended, by status: completed, failed, expired or cancelled.",
    ["status"],
    registry=REGISTRY,
)
for _status in ("completed", "failed", "expired", "cancelled"):
    ENDED.labels(_status)
WAITING = Gauge("rose_batches_waiting_lines", "Lines that wait for their turn.", registry=REGISTRY)
RUNNING = Gauge("rose_batches_running_lines", "Lines under way at the router.", registry=REGISTRY)
STORED = Gauge("rose_batches_stored_bytes", "Bytes of files and answers.", registry=REGISTRY)
