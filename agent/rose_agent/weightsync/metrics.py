"""Metrics of weight-sync, on the agent's registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from rose_agent.metrics import REGISTRY

COMMITS = Counter(
    "rose_weightsync_commits",
    "Versions committed into engines and attested.",
    registry=REGISTRY,
)
FAILURES = Counter(
    "rose_weightsync_failures",
    "Attempts to bring an engine to the head that failed, by reason.",
    ["reason"],
    registry=REGISTRY,
)
QUARANTINES = Counter(
    "rose_weightsync_quarantines",
    "Engines whose live weights were found to be wrong.",
    registry=REGISTRY,
)
FETCHED_BYTES = Counter(
    "rose_weightsync_fetched_bytes",
    "Size of the blocks of pulled bundles.",
    registry=REGISTRY,
)
PULL_SECONDS = Histogram(
    "rose_weightsync_pull_seconds",
    "Planning and fetching one bundle.",
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120, 600),
    registry=REGISTRY,
)
STAGE_SECONDS = Histogram(
    "rose_weightsync_stage_seconds",
    "Decoding and checking a bundle inside the serving engine.",
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120),
    registry=REGISTRY,
)
COMMIT_PAUSE_SECONDS = Histogram(
    "rose_weightsync_commit_pause_seconds",
    "Time an engine did not compute because of a commit.",
    buckets=(0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1),
    registry=REGISTRY,
)
RECOMPUTED_TOKENS = Counter(
    "rose_weightsync_recomputed_tokens",
    "Tokens of running requests that are prefilled again because weights have changed.",
    registry=REGISTRY,
)
PROBES = Counter(
    "rose_weightsync_probes",
    "Comparisons of what an engine computes for the fixed prompt, by outcome.",
    ["outcome"],
    registry=REGISTRY,
)
PROBE_DIFFERENCE = Gauge(
    "rose_weightsync_probe_difference_nats",
    "Mean difference of the fixed prompt's log-probs from the trainer's or the nearest engine's.",
    ["slot"],
    registry=REGISTRY,
)
FOLLOWED = Gauge(
    "rose_weightsync_followed_engines",
    "Engines whose weights are followed.",
    registry=REGISTRY,
)
