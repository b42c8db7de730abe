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
EVENTS_LEFT_OUT = Counter(
    "rose_operator_events_left_out",
    "Events that were not written because their object had too many in a row.",
    registry=REGISTRY,
)
WAITING_WRITES = Gauge(
    "rose_operator_waiting_writes",
    "Objects whose last write was refused and waits for its back-off.",
    registry=REGISTRY,
)
READABLE = Gauge(
    "rose_operator_readable",
    "1 when an optional kind (Node, HorizontalPodAutoscaler, ScaledObject) could be read.",
    ["kind"],
    registry=REGISTRY,
)
PASS_SECONDS = Histogram(
    "rose_operator_pass_seconds",
    "Duration of a reconcile pass, its writes included.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=REGISTRY,
)
PLAN_CPU_SECONDS = Histogram(
    "rose_operator_plan_cpu_seconds",
    "Processor time to look at the world and plan, without writes.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2),
    registry=REGISTRY,
)
PLAN_SECONDS = Histogram(
    "rose_operator_plan_seconds",
    "Time to look at the world and plan, without writes.",
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
LAPSES = Counter(
    "rose_operator_lead_lapses",
    "Times the lead had lapsed when it was renewed; the operator was too busy or cut off.",
    registry=REGISTRY,
)
SYNCS = Counter(
    "rose_operator_syncs",
    "Sync calls of agents by answer (complete, incomplete).",
    ["answer"],
    registry=REGISTRY,
)
ENROLMENTS = Counter(
    "rose_operator_enrolments",
    "Certificates that nodes asked for, by answer (signed, refused).",
    ["answer"],
    registry=REGISTRY,
)
GRANTS = Gauge(
    "rose_operator_grants", "Grants in the last answer to each node.", ["node"], registry=REGISTRY
)
LISTENERS = Gauge(
    "rose_operator_listening_agents",
    "Agents that are told when their grants change.",
    registry=REGISTRY,
)
SERVING_REQUESTS = Gauge(
    "rose_pool_serving_running_requests",
    "Requests of live traffic in flight, over the pool's replicas; for autoscalers of serving.",
    ["pool"],
    registry=REGISTRY,
)
SERVING_BUSY = Gauge(
    "rose_pool_serving_busy_ratio",
    "Mean share of time with live requests, over the pool's replicas; rollouts do not count.",
    ["pool"],
    registry=REGISTRY,
)
SERVING_KV = Gauge(
    "rose_pool_serving_kv_used_ratio",
    "Mean KV use of serving, over the pool's replicas; rollouts do not count.",
    ["pool"],
    registry=REGISTRY,
)
EXPECTED_BUSY = Gauge(
    "rose_pool_expected_busy_ratio",
    "Highest busy share expected within the forecast's lead, for pools with a forecast.",
    ["pool"],
    registry=REGISTRY,
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
UNWANTED_GPUS = Gauge(
    "rose_pool_unwanted_gpus",
    "GPUs of a pool that could be lent now and that no lease wants.",
    ["pool"],
    registry=REGISTRY,
)
UNWANTED_SECONDS = Counter(
    "rose_pool_unwanted_gpu_seconds",
    "GPU time that could have been lent and that no lease wanted.",
    ["pool"],
    registry=REGISTRY,
)
HARVESTED_TOKENS = Gauge(
    "rose_lease_harvested_tokens",
    "Output tokens that borrowed engines made for the lease since it was applied.",
    ["lease"],
    registry=REGISTRY,
)
ACCEPTED_TRAJECTORIES = Gauge(
    "rose_lease_accepted_trajectories",
    "Trajectories that the lease's trainer said it trained on since the lease was applied.",
    ["lease"],
    registry=REGISTRY,
)
CORRECT_ANSWERS = Gauge(
    "rose_lease_correct_answers",
    "Correct answers among them, as the trainer or their rewards said.",
    ["lease"],
    registry=REGISTRY,
)
DEDICATED_TOKENS = Gauge(
    "rose_lease_dedicated_tokens",
    "Output tokens that dedicated engines made for the lease since it was applied.",
    ["lease"],
    registry=REGISTRY,
)
TRAINED_TOKENS = Gauge(
    "rose_lease_trained_tokens",
    "Output tokens of the trajectories that the lease's trainer said it trained on.",
    ["lease"],
    registry=REGISTRY,
)
LENT_SECONDS = Gauge(
    "rose_lease_lent_seconds",
    "GPU time under a grant since the lease was applied.",
    ["lease"],
    registry=REGISTRY,
)
RESERVED_SECONDS = Gauge(
    "rose_lease_reserved_seconds",
    "GPU time under a grant, by the share of memory that serving did without for it.",
    ["lease"],
    registry=REGISTRY,
)
LATE_REVENUE = Gauge(
    "rose_lease_late_revenue",
    "What the live requests that were late beside rollouts earn, by what their pool says that "
    "tokens do; in its currency.",
    ["lease"],
    registry=REGISTRY,
)
UNLENT_RESERVED_SECONDS = Gauge(
    "rose_pool_unlent_reserved_seconds",
    "GPU time in which nobody borrowed, by the share of memory that serving did without for it.",
    ["pool"],
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
POOL_REFUSALS = Gauge(
    "rose_pool_refused",
    "1 for every pool that is not accepted, by reason.",
    ["pool", "reason"],
    registry=REGISTRY,
)
