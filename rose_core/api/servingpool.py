"""ServingPool: the serving owner's word about serving pods of its own namespace.

``Observe`` is the default and lends nothing. Everything else is a limit: what ROSE may do at most.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rose_core.api.common import (
    ATOMIC_LIST,
    SET_LIST,
    ApiModel,
    NamespaceName,
    ObjectMeta,
    Rule,
)
from rose_core.api.poolstatus import PoolStatus
from rose_core.api.wholereplica import WHOLE_REPLICA_RULES, WholeReplica
from rose_core.wire.sync import SignalSource

LabelValue = Annotated[str, Field(max_length=63)]


class PoolMode(StrEnum):
    """What ROSE may do with the pool's replicas."""

    OBSERVE = "Observe"
    LEND = "Lend"
    PAUSED = "Paused"


class ServingEngine(StrEnum):
    """Dialect of the serving engine's telemetry."""

    SGLANG = "SGLang"
    VLLM = "VLLM"


class Compute(StrEnum):
    """How the GPU's time is shared."""

    TIME_SLICE = "TimeSlice"
    MPS = "MPS"


class MemorySource(StrEnum):
    """Where lent device memory comes from."""

    RESERVED = "Reserved"
    ELASTIC = "Elastic"


class MemoryLimit(StrEnum):
    """Independent backstop for device memory."""

    NONE = "None"
    DRIVER = "Driver"


class Day(StrEnum):
    """Day of the week."""

    MON = "Mon"
    TUE = "Tue"
    WED = "Wed"
    THU = "Thu"
    FRI = "Fri"
    SAT = "Sat"
    SUN = "Sun"


class Regrow(StrEnum):
    """How a rollout engine's share of its memory comes back after serving needed it."""

    COOL_DOWN = "CoolDown"
    NEXT_STEP = "NextStep"


class Spread(StrEnum):
    """How loans are laid out over a pool."""

    LEAST_USED = "LeastUsed"
    NODES = "Nodes"
    ZONES = "Zones"


class WhenOpen(StrEnum):
    """What an open breaker does with what is lent."""

    HOLD = "Hold"
    RETURN = "Return"


class AutoscalerCheck(StrEnum):
    """Whether autoscalers that would react to borrowed load forbid lending."""

    ENFORCE = "Enforce"
    IGNORE = "Ignore"


class Selector(ApiModel):
    """Which pods serve."""

    match_labels: dict[str, LabelValue] = Field(
        min_length=1,
        max_length=16,
        description="Labels that every serving pod of the pool carries.",
    )


class Engine(ApiModel):
    """How to speak to the serving engine."""

    kind: ServingEngine = Field(
        default=ServingEngine.SGLANG, description="Dialect of the engine's telemetry."
    )
    port: int = Field(
        default=30000, ge=1, le=65535, description="Port of the engine's HTTP server in the pod."
    )


class Objective(ApiModel):
    """Absolute service-level objective of live traffic."""

    rules = (
        Rule(
            "has(self.ttftMilliseconds) || has(self.tpotMilliseconds)",
            "name at least one of ttftMilliseconds and tpotMilliseconds",
        ),
    )

    ttft_milliseconds: int | None = Field(
        default=None, ge=1, le=600_000, description="Longest time to the first token."
    )
    tpot_milliseconds: int | None = Field(
        default=None, ge=1, le=60_000, description="Longest time per output token after the first."
    )
    percentile: int = Field(
        default=99, ge=50, le=99, description="Share of requests that must meet it, percent."
    )


class TimeWindow(ApiModel):
    """A span of the day, in UTC, in which lending is allowed; it may cross midnight."""

    rules = (
        Rule(
            "self.startTime != self.endTime",
            "startTime and endTime must differ; leave timeWindows out for the whole day",
        ),
    )

    days: tuple[Day, ...] = Field(
        default=tuple(Day),
        min_length=1,
        max_length=7,
        description="Days of the week, UTC, on which the window starts.",
        json_schema_extra=SET_LIST,
    )
    start_time: str = Field(
        max_length=5, pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$", description="Start, HH:MM, UTC."
    )
    end_time: str = Field(
        max_length=5,
        pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$",
        description="End, HH:MM, UTC; before startTime it means the next day.",
    )


class Forecast(ApiModel):
    """Lend by the daily shape of the load: before the trough, and no longer before the peak."""

    lead_minutes: int = Field(
        default=30,
        ge=5,
        le=720,
        description="Loans end this long before the load that needs their replica.",
    )
    max_busy_percent: int = Field(
        default=50,
        ge=1,
        le=95,
        description="Replicas that are not lent carry the expected peak below this busy share.",
    )


class PoolBreaker(ApiModel):
    """What happens when live traffic misses its objective (condition ServingProtected)."""

    cooldown_seconds: int = Field(
        default=600,
        ge=0,
        le=86_400,
        description="No loan is made while the objective is missed and for this long after.",
    )
    when_open: WhenOpen = Field(
        default=WhenOpen.HOLD,
        description="Hold: what is lent stays lent, each GPU guarded. Return: all goes back.",
    )


class Lending(ApiModel):
    """The most that may be lent."""

    rules = (
        Rule(
            "!has(self.maxReplicasPerNode) || self.maxReplicasPercent > 0",
            "maxReplicasPerNode says nothing while maxReplicasPercent is 0: nothing is lent",
            ".maxReplicasPerNode",
        ),
    )

    max_replicas_percent: int = Field(
        default=50,
        ge=0,
        le=100,
        description="Most replicas lent at once, percent of those that report, rounded down.",
    )
    min_unlent_replicas: int = Field(
        default=1, ge=0, le=10_000, description="Replicas that stay without rollouts at all times."
    )
    max_replicas_per_node: int | None = Field(
        default=None, ge=1, le=64, description="Most replicas lent at once on one node."
    )
    max_replicas_per_zone_percent: int = Field(
        default=100,
        ge=1,
        le=100,
        description="Most of a zone's replicas lent at once, percent, rounded down.",
    )
    max_replicas_per_lease_percent: int = Field(
        default=100,
        ge=1,
        le=100,
        description="Most that one lease holds of what the pool may lend, percent; at least one.",
    )
    max_loans_per_minute: int | None = Field(
        default=None, ge=1, le=10_000, description="Most loans made in a minute."
    )
    spread: Spread = Field(
        default=Spread.LEAST_USED,
        description="LeastUsed: lowest KV use first. Nodes, Zones: first where least is lent.",
    )
    forecast: Forecast | None = Field(
        default=None, description="Lend by the daily shape of the load; absent means by limits."
    )
    breaker: PoolBreaker = Field(
        default=PoolBreaker(), description="What happens when live traffic misses its objective."
    )
    autoscaler_check: AutoscalerCheck = Field(
        default=AutoscalerCheck.ENFORCE,
        description="Enforce: an autoscaler of serving on figures of whole GPUs forbids lending.",
    )
    memory_headroom_percent: int = Field(
        default=20,
        ge=0,
        le=90,
        description="Device memory kept free above serving's highest use, percent of the total.",
    )
    memory_regrow: Regrow = Field(
        default=Regrow.COOL_DOWN,
        description="CoolDown: in steps once serving is calm. NextStep: with the next weights.",
    )
    max_power_watts: int | None = Field(
        default=None, ge=1, le=100_000, description="Most power of a lent GPU."
    )
    time_windows: tuple[TimeWindow, ...] = Field(
        default=(),
        max_length=16,
        description="When lending is allowed; empty means always.",
        json_schema_extra=ATOMIC_LIST,
    )
    borrower_namespaces: tuple[NamespaceName, ...] = Field(
        default=(),
        max_length=64,
        description="Namespaces whose leases may borrow; empty means the pool's own only.",
        json_schema_extra=SET_LIST,
    )
    price_per_gpu_hour_micros: int = Field(
        default=0,
        ge=0,
        le=10**12,
        alias="pricePerGPUHourMicros",
        description="Price of one lent GPU for one hour, millionths of the currency unit.",
    )


class PoolSpec(ApiModel):
    """What the serving owner allows."""

    rules = (
        Rule(
            "self.mode != 'Lend' || has(self.slo) || has(self.maxLatencyIncreasePercent)",
            "mode Lend needs slo or maxLatencyIncreasePercent: without one nothing tells ROSE "
            "what to protect",
            ".mode",
        ),
        Rule(
            "!has(self.busyComputePercent) || self.compute == 'MPS'",
            "busyComputePercent needs compute MPS: otherwise there are no shares",
            ".busyComputePercent",
        ),
        Rule(
            "!has(self.busyComputePercent) || self.busyComputePercent < self.maxComputePercent",
            "busyComputePercent must be smaller than maxComputePercent",
            ".busyComputePercent",
        ),
        *WHOLE_REPLICA_RULES,
    )

    mode: PoolMode = Field(
        default=PoolMode.OBSERVE,
        description="Observe: metrics only. Lend: replicas may be lent. Paused: all comes back.",
    )
    selector: Selector = Field(description="Which pods of this namespace serve.")
    engine: Engine = Field(default=Engine(), description="How to speak to the serving engine.")
    slo: Objective | None = Field(default=None, description="Objective of live traffic.")
    max_latency_increase_percent: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Most that lending may add to latency, against un-lent windows, percent.",
    )
    allowed_signals: tuple[SignalSource, ...] = Field(
        default=tuple(SignalSource),
        min_length=1,
        max_length=4,
        description="Sources that may open the gate; any source may close it.",
        json_schema_extra=SET_LIST,
    )
    lending: Lending = Field(default=Lending(), description="The most that may be lent.")
    compute: Compute = Field(
        default=Compute.TIME_SLICE,
        description="TimeSlice: separate fault domains. MPS: serving is a client of the daemon.",
    )
    max_compute_percent: int = Field(
        default=30,
        ge=1,
        le=90,
        description="Most of a GPU's compute that rollouts get, percent; with MPS its share.",
    )
    busy_compute_percent: int | None = Field(
        default=None,
        ge=1,
        le=89,
        description="With MPS: share while serving is never idle, of a second engine per slot.",
    )
    memory_source: MemorySource = Field(
        default=MemorySource.RESERVED,
        description="Reserved: serving was started with a smaller share. Elastic: it gives way.",
    )
    memory_limit: MemoryLimit = Field(
        default=MemoryLimit.NONE, description="Driver: the driver enforces a limit besides."
    )
    whole_replica: WholeReplica | None = Field(
        default=None, description="Lend sleeping replicas whole in troughs; absent means never."
    )


class ServingPool(ApiModel):
    """Serving pods whose idle GPU time may be lent, and the limits of that."""

    metadata: ObjectMeta
    spec: PoolSpec
    status: PoolStatus = PoolStatus()
