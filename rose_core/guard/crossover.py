"""Measures harm: latency in lent windows against withheld ones, or against un-lent replicas.

A replica's time falls into *cycles*: a gap between requests and the busy period after it. Each is
lent or withheld whole, by a coin (``Cycles``), so no load can keep time with it. For a trial with a
clock the coin is replaced by windows of equal length (``Schedule``). A request belongs to the cycle
of its arrival and only if it also ended in it, so nothing straddles. A relative limit is judged
only above a floor of samples in *both* classes, and by the lower end of the interval of the ratio
of quantiles: a breaker that trips on noise would lend nothing.

| compared with | when it decides |
|---|---|
| withheld cycles of the same replica | enough samples in them |
| replicas of the pool that lend nothing | until then, if they have enough |
| nothing | neither has: not judged |

The same replica comes first, because a load-aware router sends less to a slowed replica and so
hides the harm from a comparison between replicas. Next step: ``budget`` keeps the breaker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rose_core.stats import quantile

SAMPLE_FLOOR = 30
_LONGEST_NS = 10_000_000_000  # many control periods and requests; short beside a breaker's minutes
_RELATIVE_PERCENT = 10  # so that 300 requests give the 30 withheld ones of the floor
_NORMAL = 1.645  # two-sided 90 %


@dataclass(frozen=True)
class Schedule:
    """Alternating windows of a clock, of two the second withheld: each has a lent neighbour.

    Attributes:
        seconds: length of a window; 0 = there are none.
    """

    seconds: float = 0.0

    def window(self, now_s: float) -> int:
        """Number of the window that contains this moment."""
        return int(now_s / self.seconds) if self.seconds else 0

    def withheld(self, now_s: float) -> bool:
        """Whether lending is withheld in the window of this moment."""
        return bool(self.window(now_s) % 2)

    def until_ns(self, now_ns: int) -> int:
        """End of the window of this moment."""
        return round((self.window(now_ns / 1e9) + 1) * self.seconds * 1e9)


def withheld_share(percent: int, *, relative: bool) -> float:
    """Share of cycles to withhold.

    Args:
        percent: what the pool's owner gives for it.
        relative: the pool has a relative limit, which cannot be judged by fewer than a tenth.
    """
    return max(percent, _RELATIVE_PERCENT if relative else 0) / 100


@dataclass(frozen=True)
class Cycle:
    """A cycle that is over, with a request in it at least; ``slow``: one of them was."""

    withheld: bool
    slow: bool


class Cycles:
    """Cycles of one replica; single-threaded.

    | a cycle ends | its requests |
    |---|---|
    | when the replica is empty again | count, together once: those of a burst are not independent |
    | ten seconds after it began, without a request | there are none |
    | ten seconds after its first request | count if they are over; the others count nowhere |
    | at the end of a window, of a schedule | the same |

    The limits are for replicas that nobody asks and for those that are never empty: they would
    stay as they were drawn. No cycle begins at an arrival, so each request finds the gate as the
    cycle that it counts for left it.

    Args:
        schedule: windows in the coin's place, if it has any.
        draw: a number of [0, 1) by chance.
    """

    def __init__(self, schedule: Schedule, draw: Callable[[], float]) -> None:
        self._schedule, self._draw = schedule, draw
        self._number = self._until_ns = 0
        self._withheld = self._asked = False
        self._counted = self._slow = False
        self._met: dict[int, tuple[int, bool]] = {}

    def draws(self, share: float) -> bool:
        """Whether any cycle is withheld."""
        return bool(self._schedule.seconds or share)

    def advance(self, now_ns: int, share: float) -> Cycle | None:
        """Begin a new cycle if this one's time is over; returns the one that this ends.

        Args:
            now_ns: the time.
            share: of cycles to withhold.
        """
        return self._renew(now_ns, share) if now_ns >= self._until_ns else None

    @property
    def withheld(self) -> bool:
        """Whether lending is withheld in this cycle."""
        return self._withheld

    def begin(self, request: int, now_ns: int) -> None:
        """A request has come."""
        self._met[request] = self._number, self._withheld
        if not self._asked and not self._schedule.seconds:
            self._until_ns = now_ns + _LONGEST_NS
        self._asked = True

    def dismiss(self, request: int) -> None:
        """It was not a generating request after all."""
        self._met.pop(request, None)

    def forget(self) -> None:
        """Requests under way cannot be followed to their end any more."""
        self._met.clear()

    def end(self, request: int) -> tuple[bool, bool]:
        """A request is over: whether its cycle was withheld, and whether it lies in it whole."""
        number, withheld = self._met.pop(request, (-1, self._withheld))
        return withheld, number == self._number

    def count(self, *, slow: bool) -> None:
        """A request of this cycle is over, and counts."""
        self._counted, self._slow = True, self._slow or slow

    def close(self, now_ns: int, share: float) -> Cycle | None:
        """The last request under way is over; returns the cycle if one of its requests counts."""
        return None if self._met else self._renew(now_ns, share)

    def _renew(self, now_ns: int, share: float) -> Cycle | None:
        done = Cycle(self._withheld, self._slow) if self._counted else None
        windows = self._schedule
        self._number += 1
        self._counted = self._slow = self._asked = False
        if windows.seconds:
            self._withheld = windows.withheld(now_ns / 1e9)
            self._until_ns = windows.until_ns(now_ns)
        else:
            self._withheld = bool(share) and self._draw() < share
            self._until_ns = now_ns + _LONGEST_NS
        return done


@dataclass(frozen=True)
class Ratio:
    """Latency lent / withheld at one quantile, with a 90 % interval; None below the floor."""

    quantile: float
    value: float | None
    low: float | None
    high: float | None
    lent: int
    withheld: int


def floor(q: float) -> int:
    """Samples that a class needs before its quantile is judged: 30, and two beyond the quantile."""
    return max(SAMPLE_FLOOR, math.ceil(2 / (1 - q)))


def compare(lent: list[float], withheld: list[float], q: float) -> Ratio:
    """Ratio of one quantile with its interval.

    The interval comes from order statistics (each quantile's rank is binomial), joined on the
    logarithm: one sort, because this runs inside the guard's loop.
    """
    counts = len(lent), len(withheld)
    if min(counts) < floor(q):
        return Ratio(q, None, None, None, *counts)
    (one, one_error), (two, two_error) = _logarithm(lent, q), _logarithm(withheld, q)
    error = math.hypot(one_error, two_error)
    middle = one - two
    return Ratio(q, math.exp(middle), math.exp(middle - error), math.exp(middle + error), *counts)


def _logarithm(values: list[float], q: float) -> tuple[float, float]:
    """Logarithm of a quantile, and half the width of its interval."""
    ordered = sorted(max(1e-9, value) for value in values)
    spread = _NORMAL * math.sqrt(q * (1 - q) / len(ordered))
    low, middle, high = (
        math.log(quantile(ordered, min(1.0, max(0.0, q + step)))) for step in (-spread, 0.0, spread)
    )
    return middle, (high - low) / 2


@dataclass
class Meter:
    """TTFT and TPOT (seconds) of the last ``keep`` requests, of lent and of withheld cycles."""

    keep: int = 2000
    ttft: dict[bool, deque[float]] = field(default_factory=dict)
    tpot: dict[bool, deque[float]] = field(default_factory=dict)

    def add(self, *, withheld: bool, ttft_s: float | None, tpot_s: float | None) -> None:
        """Note one request."""
        for store, value in ((self.ttft, ttft_s), (self.tpot, tpot_s)):
            if value is not None:
                store.setdefault(withheld, deque(maxlen=self.keep)).append(value)

    def ratios(
        self, quantiles: tuple[float, ...], control: Meter | None = None
    ) -> dict[str, list[Ratio]]:
        """Ratios of TTFT and TPOT, lent / withheld; the withheld ones are the control's."""
        lent, withheld = self.samples(withheld=False), (control or self).samples(withheld=True)
        return {
            name: [compare(one, two, q) for q in quantiles]
            for name, one, two in zip(("ttft", "tpot"), lent, withheld, strict=True)
        }

    def samples(self, *, withheld: bool) -> list[list[float]]:
        """TTFT and TPOT of one class."""
        return [list(store.get(withheld, ())) for store in (self.ttft, self.tpot)]


@dataclass(frozen=True)
class Harm:
    """Verdict on a relative limit.

    Attributes:
        against: what lent requests were compared with; empty = not judged.
        proven: the interval lies above the limit.
    """

    against: str = ""
    proven: bool = False


def judge(meter: Meter, unlent: Meter | None, max_increase: float, q: float) -> Harm:
    """Whether lending raises a quantile by more than the limit.

    Args:
        meter: the replica's lent and withheld cycles.
        unlent: the pool's replicas that lend nothing.
        max_increase: 0 = no limit, never judged.
        q: which quantile.
    """
    if not max_increase:
        return Harm()
    lent = meter.samples(withheld=False)
    controls = [("withheld cycles", meter.samples(withheld=True))]
    if unlent is not None:
        controls.append(("un-lent replicas", unlent.samples(withheld=True)))
    for name, control in controls:
        found = [compare(one, two, q) for one, two in zip(lent, control, strict=True)]
        lows = [ratio.low for ratio in found if ratio.low is not None]
        if lows:
            return Harm(name, any(low > 1 + max_increase for low in lows))
    return Harm()
