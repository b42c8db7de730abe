"""What a sandbox host counts; ``docs/metrics.md`` lists it."""

from prometheus_client import CollectorRegistry, Counter, Gauge

REGISTRY = CollectorRegistry()

TURNS = Counter(
    "rose_sandbox_turns",
    "Boundaries by what was saved (none, files, processes, full, suspend) and why; failed: a "
    "boundary without a record.",
    ["saved", "reason"],
    registry=REGISTRY,
)
CHECKPOINT_SECONDS = Counter(
    "rose_sandbox_checkpoint_seconds", "Time that boundaries took to save.", registry=REGISTRY
)
HELD_SECONDS = Counter(
    "rose_sandbox_held_seconds",
    "Time that replies were held for their records; the rest of the above was hidden in waits for "
    "the model.",
    registry=REGISTRY,
)
RECORD_BYTES = Counter(
    "rose_sandbox_record_bytes", "Bytes that records wrote into the store.", registry=REGISTRY
)
STATE_BYTES = Counter(
    "rose_sandbox_state_bytes",
    "Bytes of files and processes that these records stand for, as if each had been saved in full.",
    registry=REGISTRY,
)
RESTORES = Counter(
    "rose_sandbox_restores", "Sandboxes that went on from a record.", ["by"], registry=REGISTRY
)
SANDBOXES = Gauge("rose_sandbox_sandboxes", "Sessions with a sandbox here.", registry=REGISTRY)
TUNNELS = Gauge(
    "rose_sandbox_tunnels", "Connections of callers elsewhere into sandboxes.", registry=REGISTRY
)
TUNNEL_ENDS = Counter(
    "rose_sandbox_tunnel_ends",
    "Tunnels that ended: closed by a side, idle, or with their sandbox; refused: there were too "
    "many.",
    ["by"],
    registry=REGISTRY,
)
