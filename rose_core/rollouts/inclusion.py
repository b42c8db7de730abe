"""The bias meter: does borrowing change which trajectories end up in a training batch?

Whether a trajectory met a borrowed engine depends on what it is: long ones have more turns. So the
meter compares by *assignment*, as a trial does: a small share of groups, drawn by their names when
they begin, runs on dedicated engines alone (``Arm.CONTROL``); the others run wherever placement
puts them, and stay of their arm whatever they met. For the trajectories of one stratum it shows the
share of those begun that was trained on, by arm:

| figure | from | interval |
|---|---|---|
| share of an arm | trained of trained and dropped | Wilson, 95 %, with the effective sample size |
| gap = any engine - dedicated alone | two such shares of different groups | Newcombe, 95 % |
| its bounds | what is *lost*: dropped in one arm, trained in the other | the wider ends |

Siblings are kept or dropped together and resemble each other, so the unit is the group: the
effective sample size is what the spread between groups leaves of the members (Kish's design
effect, with Student's t for few groups; Korn and Graubard 1998, Dean and Pagano 2015).

*Lost* are trajectories that began and of which the trainer never said what became; leaving them out
would censor exactly the victims. A stratum is *biased* when the whole interval of its gap, bounds
included, lies beyond ``TOLERANCE``. How stale a trajectory was and how often it moved is a
consequence of its arm, so those strata describe and are not judged; so does the correlation of pool
and stratum (Spearman's).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rose_core.rollouts.shares import length_bucket, length_buckets

TOLERANCE = 0.02
_Z = 1.959964
_STUDENT = (12.706, 4.303)  # 97.5 % quantiles with one and two degrees of freedom
_MOST_GROUPS = 4096  # that may still grow; one that comes back later counts as another
_ORDER = {
    "length": length_buckets(),
    "reward": ("0 or less", "above 0"),
    "staleness": ("0", "1", "2", "3+"),
    "moves": ("0", "1", "2", "3+"),
}
JUDGED = frozenset({"all", "length", "reward"})


class Fate(StrEnum):
    """What became of a trajectory."""

    TRAINED = "trained"
    DROPPED = "dropped"
    LOST = "lost"


class Arm(StrEnum):
    """What a group was assigned to when it began."""

    ANY = "any"
    CONTROL = "dedicated"


def assigned(group: str, share: float) -> Arm:
    """The arm of a group: a draw by its name, so that replicas and a router's next life agree."""
    digest = hashlib.blake2b(group.encode(errors="surrogatepass"), digest_size=8, person=b"arm")
    drawn = int.from_bytes(digest.digest()) / 2**64
    return Arm.CONTROL if drawn < share else Arm.ANY


@dataclass(frozen=True, slots=True)
class Interval:
    """A share or difference with its bounds."""

    value: float
    low: float
    high: float


def wilson(hits: float, count: float) -> Interval:
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


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t, to 1 % (from 3 degrees on by Fisher's expansion)."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))


class Clustered:
    """A share of members that come in groups; members of a group count by how alike they are.

    Args:
        most: groups that may still grow.
    """

    def __init__(self, most: int = _MOST_GROUPS) -> None:
        self.hits = self.count = self.groups = 0
        self._most = most
        self._open: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._hits2 = self._both = self._counts2 = 0

    def add(self, group: str, *, hit: bool) -> None:
        """One member."""
        hits, count = self._open.pop(group, (0, 0))
        self.groups += not count
        self._hits2 += (2 * hits + 1) * hit
        self._both += (hits + hit) * (count + 1) - hits * count
        self._counts2 += 2 * count + 1
        self.hits, self.count = self.hits + hit, self.count + 1
        self._open[group] = (hits + hit, count + 1)
        if len(self._open) > self._most:
            self._open.popitem(last=False)

    def share(self) -> Interval:
        """With its 95 % interval; one group alone says nothing of others."""
        if not self.count:
            return wilson(0, 0)
        share = self.hits / self.count
        if self.groups < 2:
            return Interval(share, 0.0, 1.0)
        size = self._effective(share) * (_Z / student(self.groups - 1)) ** 2
        return wilson(share * size, size)

    def _effective(self, share: float) -> float:
        """How many independent members would say as much."""
        alone = share * (1 - share) * self.count
        spread = self._hits2 - 2 * share * self._both + share * share * self._counts2
        spread *= self.groups / (self.groups - 1)
        if alone <= 0:  # all alike: nothing shows how much siblings resemble; taken for copies
            return self.count * self.count / self._counts2
        return min(float(self.count), self.count * alone / spread) if spread > 0 else self.count


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one trajectory.

    Attributes:
        fate: as the trainer said; lost where it never did.
        arm: what its group was assigned to.
        group: its name, or the trajectory's own; siblings count together.
        tokens: output tokens.
        borrowed: a borrowed engine wrote at least one of its tokens.
        reward: ``None`` where the trainer did not say.
        stale: publishes between its first version and its consumption; ``None`` = unknown.
        moves: how often a turn of it had to go on, or be tried again, on another engine.
    """

    fate: Fate
    arm: Arm
    group: str
    tokens: int
    borrowed: bool = False
    reward: float | None = None
    stale: int | None = None
    moves: int = 0

    def strata(self) -> Iterator[tuple[str, str]]:
        """(dimension, stratum) pairs it belongs to."""
        yield "all", "all"
        yield "length", length_bucket(self.tokens)
        if self.reward is not None:
            yield "reward", "above 0" if self.reward > 0 else "0 or less"
        if self.stale is not None:
            yield "staleness", str(self.stale) if self.stale < 3 else "3+"
        yield "moves", str(self.moves) if self.moves < 3 else "3+"


class Cell:
    """The trajectories of one stratum and arm."""

    def __init__(self) -> None:
        self._known, self._least, self._most = Clustered(), Clustered(), Clustered()

    def add(self, group: str, fate: Fate) -> None:
        """One trajectory's end."""
        if fate is not Fate.LOST:
            self._known.add(group, hit=fate is Fate.TRAINED)
        self._least.add(group, hit=fate is Fate.TRAINED)
        self._most.add(group, hit=fate is not Fate.DROPPED)

    @property
    def trained(self) -> int:
        """How many were trained on."""
        return self._known.hits

    @property
    def dropped(self) -> int:
        """How many were dropped."""
        return self._known.count - self._known.hits

    @property
    def lost(self) -> int:
        """Of how many nobody knows."""
        return self._least.count - self._known.count

    @property
    def groups(self) -> int:
        """Groups with a member here."""
        return self._least.groups

    def share(self) -> Interval:
        """Share trained of those known; its ends count what is lost as dropped, or as trained."""
        known = self._known.share()
        return Interval(known.value, self._least.share().low, self._most.share().high)

    def less(self, other: Cell) -> Interval:
        """The gap to another cell; its ends suppose the worst of what is lost in both."""
        known = newcombe(self._known.share(), other._known.share())
        least = newcombe(self._least.share(), other._most.share())
        most = newcombe(self._most.share(), other._least.share())
        return Interval(known.value, least.low, most.high)


@dataclass(frozen=True, slots=True)
class Row:
    """One stratum of the meter: the cell of each arm, and the gap between them."""

    dimension: str
    stratum: str
    any: Cell
    dedicated: Cell
    gap: Interval

    @property
    def judged(self) -> bool:
        """The stratum is none of the arm's own consequences."""
        return self.dimension in JUDGED

    @property
    def biased(self) -> bool:
        """Borrowing certainly changes how much of this stratum is trained on."""
        return self.judged and (self.gap.low > TOLERANCE or self.gap.high < -TOLERANCE)


@dataclass
class Inclusion:
    """Counts outcomes."""

    _cells: dict[tuple[str, str, Arm], Cell] = field(default_factory=dict)
    _met: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """One trajectory's end."""
        for key in outcome.strata():
            cell = self._cells.setdefault((*key, outcome.arm), Cell())
            cell.add(outcome.group, outcome.fate)
            self._met.setdefault(key, [0, 0])[not outcome.borrowed] += 1

    def rows(self) -> list[Row]:
        """Every stratum seen, in order."""
        return [self._row(*key) for key in sorted({key[:2] for key in self._cells})]

    def correlations(self) -> dict[str, float]:
        """By dimension, -1 to 1: above 0, higher strata met borrowed engines more often.

        Left out where all trajectories are of one stratum or of one pool.
        """
        found = {
            dimension: _rank_correlation([self._contacts(dimension, name) for name in names])
            for dimension, names in _ORDER.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    def _contacts(self, dimension: str, stratum: str) -> tuple[int, int]:
        """How many of the stratum met a borrowed engine, and how many did not."""
        met, alone = self._met.get((dimension, stratum), (0, 0))
        return met, alone

    def _row(self, dimension: str, stratum: str) -> Row:
        some = self._cells.get((dimension, stratum, Arm.ANY), Cell())
        control = self._cells.get((dimension, stratum, Arm.CONTROL), Cell())
        return Row(dimension, stratum, some, control, some.less(control))


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
