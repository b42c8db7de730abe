"""What was used and what came out of it.

Everything is an integer (milliseconds, tokens, bytes, counts), so that ledgers of slots, leases
and days add up without rounding. Money is in ``cost``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce

_MILLISECONDS_PER_HOUR = 3_600_000


class GpuTier(StrEnum):
    """Whether the GPU was dedicated to rollouts or borrowed from serving."""

    DEDICATED = "Dedicated"
    BORROWED = "Borrowed"


@dataclass(frozen=True)
class GpuTime:
    """GPU time of one tier.

    Attributes:
        held_milliseconds: GPU-milliseconds during which the slot or engine existed.
        computing_milliseconds: part of it during which rollouts could compute (gate open); for a
            dedicated engine the same as held.
    """

    held_milliseconds: int = 0
    computing_milliseconds: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError: negative time, or more computing than held."""
        if not 0 <= self.computing_milliseconds <= self.held_milliseconds:
            message = (
                f"computing {self.computing_milliseconds} ms must lie between 0 and "
                f"held {self.held_milliseconds} ms"
            )
            raise ValueError(message)

    def __add__(self, other: GpuTime) -> GpuTime:
        return GpuTime(
            self.held_milliseconds + other.held_milliseconds,
            self.computing_milliseconds + other.computing_milliseconds,
        )

    @property
    def held_hours(self) -> float:
        """GPU-hours held."""
        return self.held_milliseconds / _MILLISECONDS_PER_HOUR

    @property
    def computing_hours(self) -> float:
        """GPU-hours in which rollouts could compute."""
        return self.computing_milliseconds / _MILLISECONDS_PER_HOUR

    @property
    def duty(self) -> float | None:
        """Computing share of the held time; unknown without held time."""
        if self.held_milliseconds == 0:
            return None
        return self.computing_milliseconds / self.held_milliseconds


@dataclass(frozen=True)
class OutputTokens:
    """Output tokens.

    Attributes:
        produced: sampled by engines.
        redone: sampled again because the first copy could not be kept.
        discarded: in turns that no accepted trajectory contains.
    """

    produced: int = 0
    redone: int = 0
    discarded: int = 0

    def __add__(self, other: OutputTokens) -> OutputTokens:
        return OutputTokens(
            self.produced + other.produced,
            self.redone + other.redone,
            self.discarded + other.discarded,
        )

    @property
    def useful(self) -> int:
        """Tokens that ended in accepted trajectories."""
        return self.produced - self.redone - self.discarded


def _sum(one: int | None, other: int | None) -> int | None:
    """With something unknown in it the sum is unknown."""
    return None if one is None or other is None else one + other


@dataclass(frozen=True)
class Trajectories:
    """Trajectories by how far they came; each number contains the next.

    Attributes:
        started, finished: ``None`` = unknown: a lease's reports do not count them.
    """

    started: int | None = 0
    finished: int | None = 0
    accepted: int = 0
    correct: int = 0

    def __add__(self, other: Trajectories) -> Trajectories:
        return Trajectories(
            _sum(self.started, other.started),
            _sum(self.finished, other.finished),
            self.accepted + other.accepted,
            self.correct + other.correct,
        )


@dataclass(frozen=True)
class ServingImpact:
    """Serving requests beside rollouts, and SLO violations beyond the serving-alone run.

    Attributes:
        allowed_hundredths: violations that the SLO allows among the requests (its error budget),
            in hundredths, so that budgets of different percentiles add up; 0 = no SLO is known.
    """

    requests: int = 0
    added_violations: int = 0
    allowed_hundredths: int = 0

    def __add__(self, other: ServingImpact) -> ServingImpact:
        return ServingImpact(
            self.requests + other.requests,
            self.added_violations + other.added_violations,
            self.allowed_hundredths + other.allowed_hundredths,
        )

    @property
    def budget_used(self) -> float | None:
        """Share of the error budget that added violations took; unknown without a budget."""
        if self.allowed_hundredths == 0:
            return None
        return self.added_violations * 100 / self.allowed_hundredths


def allowed_hundredths(requests: int, percentile: int) -> int:
    """What an SLO at a percentile (0 to 100) allows to be late, in hundredths of a request."""
    return requests * (100 - percentile)


@dataclass(frozen=True)
class Ledger:
    """Everything used and produced in some span of time; ledgers add up.

    Attributes:
        reserved_milliseconds: GPU time of borrowed GPUs, by the share of memory that serving did
            without for it.
        unlent_reserved_milliseconds: the same of GPUs that nobody borrowed meanwhile. It belongs
            to a pool, or to a run that has its pools to itself, and to no lease.
    """

    dedicated: GpuTime = field(default_factory=GpuTime)
    borrowed: GpuTime = field(default_factory=GpuTime)
    tokens: OutputTokens = field(default_factory=OutputTokens)
    trajectories: Trajectories = field(default_factory=Trajectories)
    serving: ServingImpact = field(default_factory=ServingImpact)
    weight_bytes: int = 0
    reserved_milliseconds: int = 0
    unlent_reserved_milliseconds: int = 0

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            self.dedicated + other.dedicated,
            self.borrowed + other.borrowed,
            self.tokens + other.tokens,
            self.trajectories + other.trajectories,
            self.serving + other.serving,
            self.weight_bytes + other.weight_bytes,
            self.reserved_milliseconds + other.reserved_milliseconds,
            self.unlent_reserved_milliseconds + other.unlent_reserved_milliseconds,
        )

    @property
    def reserved_hours(self) -> float:
        """GPU-hours that the memory kept back comes to."""
        return self.reserved_milliseconds / _MILLISECONDS_PER_HOUR

    @property
    def unlent_reserved_hours(self) -> float:
        """The same of memory that was kept back while nobody borrowed."""
        return self.unlent_reserved_milliseconds / _MILLISECONDS_PER_HOUR

    def gpu(self, tier: GpuTier) -> GpuTime:
        """GPU time of one tier."""
        return self.dedicated if tier is GpuTier.DEDICATED else self.borrowed


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """Sum of many ledgers."""
    return reduce(Ledger.__add__, ledgers, Ledger())
