"""Metrics of the operator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

API_WRITES = Counter(
    "rose_operator_api_writes",
    "Write requests to the API server by kind and verb; zero on a correct world.",
    ["kind", "verb"],
    registry=REGISTRY,
)
API_FAILURES = Counter(
    "rose_operator_api_failures",
    "Requests to the API server that failed, by why.",
    ["why"],
    registry=REGISTRY,
)
PLAN_SECONDS = Histogram(
    "rose_operator_plan_seconds",
    "Duration of a reconcile pass, its writes included.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=REGISTRY,
)
LAST_PASS = Gauge(
    "rose_operator_last_pass_timestamp_seconds",
    "When the last reconcile pass ended, seconds since the epoch.",
    registry=REGISTRY,
)
TERM = Gauge("rose_operator_term", "Leader term; 0 while following.", registry=REGISTRY)
LEADER_STATE = Gauge(
    "rose_operator_leader_state",
    "1 for the state of the leader lock (Follower, Leader, Offline, Deposed).",
    ["state"],
    registry=REGISTRY,
)
SYNCS = Counter(
    "rose_operator_syncs",
    "Sync calls of agents by answer (complete, incomplete).",
    ["answer"],
    registry=REGISTRY,
)
GRANTS = Gauge(
    "rose_operator_grants", "Grants in the last answer to each node.", ["node"], registry=REGISTRY
)
REPLICAS = Gauge(
    "rose_pool_replicas",
    "Serving replicas of a pool by the planner's verdict.",
    ["pool", "reason"],
    registry=REGISTRY,
)
SLOTS = Gauge(
    "rose_lease_slots",
    "Slots of a lease: wanted, granted, ready.",
    ["lease", "what"],
    registry=REGISTRY,
)
HARVESTED_TOKENS = Gauge(
    "rose_lease_harvested_tokens",
    "Output tokens that borrowed engines made for the lease since it was applied.",
    ["lease"],
    registry=REGISTRY,
)
LENT_SECONDS = Gauge(
    "rose_lease_lent_seconds",
    "GPU time under a grant since the lease was applied.",
    ["lease"],
    registry=REGISTRY,
)
DECISIONS = Counter(
    "rose_planner_decisions",
    "Slots lent and released, with the reason.",
    ["decision", "reason"],
    registry=REGISTRY,
)
REFUSALS = Gauge(
    "rose_lease_refused",
    "1 for every lease that is not accepted, by reason.",
    ["lease", "reason"],
    registry=REGISTRY,
)
