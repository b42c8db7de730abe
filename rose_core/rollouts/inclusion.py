"""The bias meter: does borrowing change which trajectories end up in a training batch?

For trajectories of one stratum (as long, as good, as stale, as often moved), the share of those
begun that was trained on, with and without a borrowed engine. The trainer says what it trained on
and what it dropped (``POST /trajectories``); what it never mentions is unknown and left out.

| figure | from | interval |
|---|---|---|
| share trained, one pool | k of n | Wilson, 95 % |
| gap = with borrowed engines - dedicated alone | two such shares | Newcombe, 95 % |

A stratum is *biased* when the whole interval of its gap lies beyond ``TOLERANCE``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rose_core.rollouts.shares import length_bucket

TOLERANCE = 0.02
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """A share or difference with its bounds."""

    value: float
    low: float
    high: float


def wilson(hits: int, count: int) -> Interval:
    """The share ``hits / count`` with its 95 % interval; of nothing everything is possible."""
    if not count:
        return Interval(math.nan, 0.0, 1.0)
    share, z2 = hits / count, _Z * _Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = _Z / (1 + z2 / count)
    spread *= math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return Interval(share, max(0.0, middle - spread), min(1.0, middle + spread))


def newcombe(one: Interval, other: Interval) -> Interval:
    """``one - other`` with its 95 % interval, from the intervals of two independent shares."""
    gap = one.value - other.value
    if math.isnan(gap):
        return Interval(math.nan, one.low - other.high, one.high - other.low)
    low = math.hypot(one.value - one.low, other.high - other.value)
    high = math.hypot(one.high - one.value, other.value - other.low)
    return Interval(gap, gap - low, gap + high)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one trajectory.

    Attributes:
        trained: it was in a batch; otherwise it was dropped.
        borrowed: a borrowed engine wrote at least one of its tokens.
        tokens: output tokens.
        reward: ``None`` where the trainer did not say.
        stale: publishes between its first version and its consumption; ``None`` = unknown.
        moves: how often a turn of it had to go on, or be tried again, on another engine.
    """

    trained: bool
    borrowed: bool
    tokens: int
    reward: float | None = None
    stale: int | None = None
    moves: int = 0

    def strata(self) -> Iterator[tuple[str, str]]:
        """(dimension, stratum) pairs it belongs to."""
        yield "length", length_bucket(self.tokens)
        if self.reward is not None:
            yield "reward", "above 0" if self.reward > 0 else "0 or less"
        if self.stale is not None:
            yield "staleness", str(self.stale) if self.stale < 3 else "3+"
        yield "moves", str(self.moves) if self.moves < 3 else "3+"


@dataclass(frozen=True, slots=True)
class Row:
    """One stratum of the meter."""

    dimension: str
    stratum: str
    borrowed: Interval
    dedicated: Interval
    counts: tuple[int, int]
    gap: Interval

    @property
    def biased(self) -> bool:
        """Borrowing certainly changes how much of this stratum is trained on."""
        return self.gap.low > TOLERANCE or self.gap.high < -TOLERANCE


@dataclass
class Inclusion:
    """Counts outcomes."""

    _counts: dict[tuple[str, str, bool], list[int]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """One trajectory's end."""
        for dimension, stratum in outcome.strata():
            cell = self._counts.setdefault((dimension, stratum, outcome.borrowed), [0, 0])
            cell[0] += outcome.trained
            cell[1] += 1

    def rows(self) -> list[Row]:
        """Every stratum seen, in order."""
        return [self._row(*key) for key in sorted({key[:2] for key in self._counts})]

    def _row(self, dimension: str, stratum: str) -> Row:
        ours = self._counts.get((dimension, stratum, True), [0, 0])
        alone = self._counts.get((dimension, stratum, False), [0, 0])
        with_, without = wilson(*ours), wilson(*alone)
        counts = (ours[1], alone[1])
        return Row(dimension, stratum, with_, without, counts, newcombe(with_, without))
