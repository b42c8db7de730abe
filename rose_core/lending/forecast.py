"""The daily shape of a pool's load: learned from reports, asked for the next minutes.

A ``UsualLoad`` holds, for every half hour of the day (UTC), the usual share of busy time over the
pool's replicas, in permille. Each day moves a bin by a third of what it has seen, so a shape knows
a new habit after three days and forgets one odd day. A bin that was never seen is unknown, and an
outlook over an unknown bin falls back to the present load: it neither lends nor shrinks on a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rose_core.lending.facts import LoadOutlook

BINS = 48  # half hours: finer than daily habits move, coarse enough to see each bin daily
BIN_SECONDS = 1800.0
_DAY_SECONDS = BINS * BIN_SECONDS
_PER_DAY = 1 / 3
# The present may differ from the usual day by this much before the shape is no guide.
_LEAST_LEVEL, _MOST_LEVEL = 0.5, 2.0
_QUIET_PERMILLE = 20.0
# An engine start and its weights.
_START_SECONDS = 120.0


@dataclass(frozen=True)
class UsualLoad:
    """Usual load by half hour, and the one that is being observed.

    Attributes:
        permille: bin -> usual busy time; None for a bin that was never seen.
        bin: the observed bin's number since the epoch, -1 before the first observation.
        total, count: sum and number of its observations.
    """

    permille: tuple[float | None, ...] = (None,) * BINS
    bin: int = -1
    total: float = 0.0
    count: int = 0

    @property
    def present(self) -> float | None:
        """Mean of the bin that is being observed."""
        return self.total / self.count if self.count else None

    @property
    def learned(self) -> bool:
        """Whether a whole day has been seen."""
        return None not in self.permille


def observe(shape: UsualLoad, busy_permille: float, now: float) -> UsualLoad:
    """Take one observation of the pool's load in; a bin that ends is learned."""
    current = int(now // BIN_SECONDS)
    if current == shape.bin:
        return replace(shape, total=shape.total + busy_permille, count=shape.count + 1)
    return UsualLoad(_learned(shape), current, busy_permille, 1)


def _learned(shape: UsualLoad) -> tuple[float | None, ...]:
    mean = shape.present
    if mean is None:
        return shape.permille
    place = shape.bin % BINS
    before = shape.permille[place]
    after = mean if before is None else before + _PER_DAY * (mean - before)
    return (*shape.permille[:place], after, *shape.permille[place + 1 :])


def restored(permille: Sequence[int]) -> UsualLoad:
    """A shape as it was written into a status; -1 stands for a bin that was never seen."""
    if len(permille) != BINS:
        return UsualLoad()
    return UsualLoad(tuple(None if value < 0 else float(value) for value in permille))


def written(shape: UsualLoad) -> tuple[int, ...]:
    """The shape for a status; empty while nothing was learned."""
    if all(value is None for value in shape.permille):
        return ()
    return tuple(-1 if value is None else round(value) for value in shape.permille)


def outlook(
    shape: UsualLoad, now: float, lead_seconds: float, max_busy_permille: int
) -> LoadOutlook:
    """Highest load until the horizon, from where a loan that is made now begins to give.

    So lending starts before the trough, and ends ``lead_seconds`` before the peak. The usual day is
    scaled by how today compares with it so far. A horizon beyond a day is a day.
    """
    present = shape.present
    if present is None:  # nobody knows the load: all replicas are needed
        return LoadOutlook(1000, lead_seconds, max_busy_permille, learned=False)
    level = _level(shape, present, now)
    usuals = [_usual(shape, at) for at in _steps(now, min(lead_seconds, _DAY_SECONDS))]
    expected = max(present if usual is None else usual * level for usual in usuals)
    peak = min(1000, round(expected))
    return LoadOutlook(peak, lead_seconds, max_busy_permille, learned=None not in usuals)


def _steps(now: float, lead_seconds: float) -> list[float]:
    """When a loan made now would begin to give, the middle of every half hour, the horizon."""
    begin, end = now + min(_START_SECONDS, lead_seconds), now + lead_seconds
    first = (begin / BIN_SECONDS - 0.5) // 1 + 1.5
    middles = [(first + number) * BIN_SECONDS for number in range(BINS)]
    return [begin, *(at for at in middles if at < end), end]


def _usual(shape: UsualLoad, at: float) -> float | None:
    """Between the middles of two bins the shape is a straight line."""
    position = at / BIN_SECONDS - 0.5
    low = int(position // 1)
    rest = position - low
    here, there = shape.permille[low % BINS], shape.permille[(low + 1) % BINS]
    if here is None or there is None:
        return None
    return here * (1 - rest) + there * rest


def _level(shape: UsualLoad, present: float, now: float) -> float:
    usual = _usual(shape, now)
    if usual is None or usual < _QUIET_PERMILLE:
        return 1.0
    return min(_MOST_LEVEL, max(_LEAST_LEVEL, present / usual))
