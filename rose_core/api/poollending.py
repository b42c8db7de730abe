"""How far lending from a ServingPool may go: ``spec.lending``, limits and manners.

Everything here is the most that may be done; ``rose_core.lending`` decides what is.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rose_core.api.common import (
    ATOMIC_LIST,
    SET_LIST,
    ApiModel,
    LabelValue,
    NamespaceName,
    Rule,
)


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


class NamespaceSelector(ApiModel):
    """Which namespaces, by their labels."""

    match_labels: dict[str, LabelValue] = Field(
        min_length=1,
        max_length=16,
        description="Labels of the Namespace, all of which it has.",
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
        Rule(
            "!has(self.memoryHeadroomGiB) || !has(self.memoryHeadroomPercent)",
            "give memoryHeadroomGiB or memoryHeadroomPercent, not both; without either it follows "
            "from how the serving engine holds its memory",
            ".memoryHeadroomPercent",
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
    memory_headroom_gib: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        alias="memoryHeadroomGiB",
        description="Device memory kept free on each GPU above serving's highest use, GiB. Absent "
        "means 3 beside a static pool (4 in the first day, 6 in the first hour that it is watched) "
        "and 20 percent beside an elastic one.",
    )
    memory_headroom_percent: int | None = Field(
        default=None,
        ge=0,
        le=90,
        description="The same as a share of the GPU, percent; in place of memoryHeadroomGiB.",
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
        description="Namespaces whose leases may borrow; empty, without borrowerNamespaceSelector, "
        "means the pool's own only.",
        json_schema_extra=SET_LIST,
    )
    borrower_namespace_selector: NamespaceSelector | None = Field(
        default=None,
        description="More such namespaces, by their labels; needs tenancy to be enforced.",
    )
    price_per_gpu_hour_micros: int = Field(
        default=0,
        ge=0,
        le=10**12,
        alias="pricePerGPUHourMicros",
        description="Price of one lent GPU for one hour, millionths of the currency unit.",
    )
