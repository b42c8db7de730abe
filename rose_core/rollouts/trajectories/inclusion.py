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
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import msgspec

from rose_core.rollouts.trajectories.shares import length_bucket, length_buckets
from rose_core.stats import Clustered, Share, newcombe

TOLERANCE = 0.02
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


@lru_cache(4096)  # siblings have one
def assigned(group: str, share: float) -> Arm:
    """The arm of a group: a draw by its name, so that replicas and a router's next life agree."""
    digest = hashlib.blake2b(group.encode(errors="surrogatepass"), digest_size=8, person=b"arm")
    drawn = int.from_bytes(digest.digest()) / 2**64
    return Arm.CONTROL if drawn < share else Arm.ANY


class TrajectoryOutcome(msgspec.Struct, frozen=True, gc=False):
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

    def kind(self) -> tuple[object, ...]:
        """What its strata and arm follow from: there are a few hundred kinds at most."""
        reward, stale, moves = self.reward, self.stale, self.moves
        return (
            self.arm,
            length_bucket(self.tokens),
            reward if reward is None else reward > 0,
            stale if stale is None or stale < 3 else 3,
            min(3, moves),
        )

    def strata(self) -> Iterator[tuple[str, str]]:
        """(dimension, stratum) pairs it belongs to."""
        yield "all", "all"
        yield "length", length_bucket(self.tokens)
        if self.reward is not None:
            yield "reward", "above 0" if self.reward > 0 else "0 or less"
        if self.stale is not None:
            yield "staleness", str(self.stale) if self.stale < 3 else "3+"
        yield "moves", str(self.moves) if self.moves < 3 else "3+"


class InclusionCell:
    """The trajectories of one stratum and arm.

    Attributes:
        borrowed: how many of them met a borrowed engine.
    """

    def __init__(self) -> None:
        # What is known, and the same with what is lost counted as dropped, and as trained: one
        # until something is lost, for each turn may end a trajectory.
        self._known = self._least = self._most = Clustered()
        self.borrowed = 0

    def add(self, group: str, fate: Fate, *, borrowed: bool = False, times: int = 1) -> None:
        """Count the ends of so many trajectories of a group that are alike."""
        self.borrowed += borrowed * times
        if fate is Fate.LOST:
            if self._least is self._known:
                self._least, self._most = copy(self._known), copy(self._known)
            self._least.add(group, hit=False, times=times)
            self._most.add(group, hit=True, times=times)
            return
        hit = fate is Fate.TRAINED
        self._known.add(group, hit=hit, times=times)
        if self._least is not self._known:
            self._least.add(group, hit=hit, times=times)
            self._most.add(group, hit=hit, times=times)

    @property
    def count(self) -> int:
        """How many trajectories there are."""
        return self._least.count

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

    def share(self) -> Share:
        """Share trained of those known; its ends count what is lost as dropped, or as trained."""
        known = self._known.share()
        return Share(known.value, self._least.share().low, self._most.share().high)

    def less(self, other: InclusionCell) -> Share:
        """The gap to another cell; its ends suppose the worst of what is lost in both."""
        known = newcombe(self._known.share(), other._known.share())
        least = newcombe(self._least.share(), other._most.share())
        most = newcombe(self._most.share(), other._least.share())
        return Share(known.value, least.low, most.high)


@dataclass(frozen=True, slots=True)
class InclusionRow:
    """One stratum of the meter: the cell of each arm, and the gap between them."""

    dimension: str
    stratum: str
    any: InclusionCell
    dedicated: InclusionCell
    gap: Share

    @property
    def judged(self) -> bool:
        """The stratum is none of the arm's own consequences."""
        return self.dimension in JUDGED

    @property
    def biased(self) -> bool:
        """Borrowing certainly changes how much of this stratum is trained on."""
        return self.judged and (self.gap.low > TOLERANCE or self.gap.high < -TOLERANCE)


_Alike = tuple[tuple[object, ...], str, Fate, bool]
_MOST_PENDING = 256


class Inclusion:
    """Counts outcomes.

    Siblings end soon after each other and are mostly alike. So outcomes are kept by what they have
    in common, and reach the cells of their strata together: when somebody asks, or there are many.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, Arm], InclusionCell] = {}
        self._alike: dict[tuple[object, ...], list[InclusionCell]] = {}
        self._pending: dict[_Alike, int] = {}

    def add(self, outcome: TrajectoryOutcome) -> None:
        """Count one trajectory's end."""
        kind, pending = outcome.kind(), self._pending
        if kind not in self._alike:
            self._alike[kind] = [self._cell(key, outcome.arm) for key in outcome.strata()]
        alike = kind, outcome.group, outcome.fate, outcome.borrowed
        pending[alike] = pending.get(alike, 0) + 1
        if len(pending) > _MOST_PENDING:
            self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, {}
        for (kind, group, fate, borrowed), times in pending.items():
            for cell in self._alike[kind]:
                cell.add(group, fate, borrowed=borrowed, times=times)

    @property
    def _cells(self) -> dict[tuple[str, str, Arm], InclusionCell]:
        self._settle()
        return self._made

    def _cell(self, key: tuple[str, str], arm: Arm) -> InclusionCell:
        place = (*key, arm)
        cell = self._made.get(place)
        if cell is None:  # no ``setdefault``: it would make one for every outcome
            cell = self._made[place] = InclusionCell()
        return cell

    def rows(self) -> list[InclusionRow]:
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
        found = [self._cells.get((dimension, stratum, arm)) for arm in Arm]
        cells = [cell for cell in found if cell is not None]
        met = sum(cell.borrowed for cell in cells)
        return met, sum(cell.count for cell in cells) - met

    def _row(self, dimension: str, stratum: str) -> InclusionRow:
        some = self._cells.get((dimension, stratum, Arm.ANY), InclusionCell())
        control = self._cells.get((dimension, stratum, Arm.CONTROL), InclusionCell())
        return InclusionRow(dimension, stratum, some, control, some.less(control))


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
