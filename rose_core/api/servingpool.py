"""ServingPool: what a serving owner lends of serving pods in its own namespace.

``Observe`` is the default and lends nothing. Everything else is a limit: what ROSE may do at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from rose_core.accounting.late import TokenRevenue
from rose_core.api.common import SET_LIST, ApiModel, LabelValue, ObjectMeta, Rule
from rose_core.api.names import PoolMode
from rose_core.api.poollending import Lending
from rose_core.api.poolstatus import PoolStatus
from rose_core.api.wholereplica import WHOLE_REPLICA_RULES, WholeReplica
from rose_core.wire.sync import SignalSource

MPS_PERCENT = 30
"""Share of the multiprocessors where the owner names none: serving keeps most of them."""


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
        Rule(
            "!has(self.ttftAloneMilliseconds) || (has(self.ttftMilliseconds) && "
            "self.ttftAloneMilliseconds < self.ttftMilliseconds)",
            "ttftAloneMilliseconds must be below ttftMilliseconds: nothing is left for lending",
            ".ttftAloneMilliseconds",
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
    ttft_alone_milliseconds: int | None = Field(
        default=None,
        ge=1,
        le=600_000,
        description=(
            "What a request that finds its replica empty takes to its first token with nothing "
            "lent, at the percentile; learned from traffic when not given."
        ),
    )


class Revenue(ApiModel):
    """What the pool's own requests earn, in millionths of the currency unit."""

    rules = (
        Rule(
            "has(self.perMillionInputTokensMicros) || has(self.perMillionOutputTokensMicros)",
            "name at least one of perMillionInputTokensMicros and perMillionOutputTokensMicros",
        ),
    )

    per_million_input_tokens_micros: int | None = Field(
        default=None, ge=0, le=10**12, description="By a million tokens of prompts."
    )
    per_million_output_tokens_micros: int | None = Field(
        default=None, ge=0, le=10**12, description="By a million tokens of answers."
    )

    @property
    def of_tokens(self) -> TokenRevenue:
        """The same, for the formulas; what is not said earns nothing."""
        return TokenRevenue(
            self.per_million_input_tokens_micros or 0, self.per_million_output_tokens_micros or 0
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
            "!has(self.busyComputePercent) || self.busyComputePercent < "
            "(has(self.maxComputePercent) ? self.maxComputePercent : 30)",
            "busyComputePercent must be smaller than maxComputePercent",
            ".busyComputePercent",
        ),
        Rule(
            "self.compute != 'MPS' || !has(self.maxComputePercent) || self.maxComputePercent <= 90",
            "maxComputePercent must not exceed 90 with compute MPS: serving needs a share too",
            ".maxComputePercent",
        ),
        Rule(
            "has(self.slo) || (self.lending.breaker.whenOpen == 'Hold' && "
            "self.lending.breaker.cooldownSeconds == 600)",
            "lending.breaker needs slo: it opens when live traffic misses that; beside "
            "maxLatencyIncreasePercent alone each node's guard stops by itself",
            ".lending.breaker",
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
        description="Most that lending may add to latency, against un-lent cycles, percent.",
    )
    withheld_percent: int = Field(
        default=2,
        ge=0,
        le=50,
        description="Share of the gaps between requests in which lending is withheld by a coin, so "
        "that the pool's status can say what lending has made slow, percent. With "
        "maxLatencyIncreasePercent it is 10 at least.",
    )
    revenue: Revenue | None = Field(
        default=None,
        description="What live traffic earns: one request's worth is the price of a late one. When "
        "not given, that is what the pool's GPUs cost by the requests that they served.",
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
    max_compute_percent: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Most of a GPU's compute that rollouts get beside awake serving, percent. "
        "TimeSlice: of any second, unset = 100. MPS: of the multiprocessors, unset = 30, most 90.",
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


def revenue_of(pools: Iterable[ServingPool | None]) -> TokenRevenue | None:
    """What these pools say that tokens earn; None where one is gone or silent, or they differ."""
    said = {None if pool is None else pool.spec.revenue for pool in pools}
    alike = said.pop() if len(said) == 1 else None
    return None if alike is None else alike.of_tokens
