"""``wholeReplica``: in a trough a replica is drained, put to sleep, and its GPUs are lent whole.

Opt-in and last: only for replicas whose memory leaves nothing to lend beside serving, and only as
many as the daily shape of the load leaves over, counted as if no sleeper ever woke.
"""

from __future__ import annotations

from pydantic import Field

from rose_core.api.common import ApiModel, Rule


class WholeReplica(ApiModel):
    """How many replicas may sleep, and how they are put to sleep and woken."""

    max_replicas: int = Field(
        default=1, ge=1, le=10_000, description="Most replicas that sleep at once."
    )
    min_awake_replicas: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Replicas that stay Ready at all times, as if no sleeper ever woke.",
    )
    max_busy_percent: int = Field(
        default=30,
        ge=1,
        le=80,
        description="Replicas that stay awake carry the expected peak below this busy share.",
    )
    min_released_mebibytes: int = Field(
        ge=1,
        le=10_000_000,
        description="Memory that a replica must give before it counts as asleep, MiB.",
    )
    drain_seconds: int = Field(
        default=60,
        ge=5,
        le=600,
        description="Longest time until a draining pod is not Ready and has no request.",
    )
    wake_seconds: int = Field(
        default=60,
        ge=5,
        le=900,
        description="Longest time until a woken engine answers as before; then it is restarted.",
    )


WHOLE_REPLICA_RULES = (
    Rule(
        "!has(self.wholeReplica) || has(self.lending.forecast)",
        "wholeReplica needs lending.forecast: the daily shape of the load tells what a trough is",
        ".wholeReplica",
    ),
    Rule(
        "!has(self.wholeReplica) || !has(self.lending.forecast) || "
        "self.wholeReplica.maxBusyPercent <= self.lending.forecast.maxBusyPercent",
        "wholeReplica.maxBusyPercent must not exceed lending.forecast.maxBusyPercent: a replica "
        "that sleeps comes back later than one that is shared",
        ".wholeReplica.maxBusyPercent",
    ),
    Rule(
        "!has(self.wholeReplica) || self.compute == 'TimeSlice'",
        "wholeReplica needs compute TimeSlice: a client of an MPS server is not put to sleep",
        ".wholeReplica",
    ),
    Rule(
        "!has(self.wholeReplica) || self.memorySource == 'Reserved'",
        "wholeReplica needs memorySource Reserved: Elastic memory gives way without sleep",
        ".wholeReplica",
    ),
)
