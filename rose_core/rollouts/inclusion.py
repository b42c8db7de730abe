"""The bias meter: does borrowing change which trajectories end up in a training batch?

For trajectories of one stratum (as long, as good, as stale, as often moved), the share of those
begun that was trained on, with and without a borrowed engine. The trainer says what it trained on
and what it dropped (``POST /trajectories``); what it never mentions is unknown and left out.

| figure | from | interval |
|---|---|---|
| share trained, one pool | k of n | Wilson, 95 % |
| gap = with borrowed engines - dedicated alone | two such shares | Newcombe, 95 % |

A stratum is *biased* when the whole interval of its gap lies beyond ``TOLERANCE``. Beside it stands
a diagnostic, no verdict: how much the pool and the order of the strata go together (Spearman's rank
correlation). Long trajectories meet borrowed engines more often than short ones however they are
placed, because they have more turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rose_core.rollouts.shares import length_bucket, length_buckets

TOLERANCE = 0.02
_Z = 1.959964
_ORDER = {
    "length": length_buckets(),
    "reward": ("0 or less", "above 0"),
    "staleness": ("0", "1", "2", "3+"),
    "moves": ("0", "1", "2", "3+"),
}


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

    def correlations(self) -> dict[str, float]:
        """By dimension, -1 to 1: above 0, higher strata met borrowed engines more often.

        Left out where all trajectories are of one stratum or of one pool.
        """
        found = {
            dimension: _rank_correlation([self._cell(dimension, name) for name in names])
            for dimension, names in _ORDER.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    def _cell(self, dimension: str, stratum: str) -> tuple[int, int]:
        """How many of the stratum met a borrowed engine, and how many did not."""
        ours, alone = (self._counts.get((dimension, stratum, pool)) for pool in (True, False))
        return (ours[1] if ours else 0, alone[1] if alone else 0)

    def _row(self, dimension: str, stratum: str) -> Row:
        ours = self._counts.get((dimension, stratum, True), [0, 0])
        alone = self._counts.get((dimension, stratum, False), [0, 0])
        with_, without = wilson(*ours), wilson(*alone)
        counts = (ours[1], alone[1])
        return Row(dimension, stratum, with_, without, counts, newcombe(with_, without))


def _rank_correlation(cells: Sequence[tuple[int, int]]) -> float | None:
    """Spearman's correlation of an ordered stratum with one of two pools; ties share their rank."""
    ours, total = sum(ours for ours, _ in cells), sum(map(sum, cells))
    share = ours / total if total else 0.0
    below, both, spread = 0, 0.0, 0.0
    for one, other in cells:
        count = one + other
        away = below + count / 2 - total / 2  # the stratum's mean rank, less that of all
        both += away * (one - share * count)
        spread += away * away * count
        below += count
    if not spread or not 0 < share < 1:
        return None
    return both / math.sqrt(spread * total * share * (1 - share))
