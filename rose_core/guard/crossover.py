"""Measures harm: latency in lent windows against withheld ones, or against un-lent replicas.

Windows of equal length are lent or withheld (``Schedule``). A request belongs to the window of its
arrival and only if it also ended in it, so nothing straddles. A relative limit is judged only above
a floor of samples in *both* classes, and by the lower end of the interval of the ratio of
quantiles: a breaker that trips on noise would lend nothing.

| compared with | when it decides |
|---|---|
| withheld windows of the same replica | enough samples in them |
| replicas of the pool that lend nothing | until then, if they have enough |
| nothing | neither has: not judged |

Same-replica windows come first, because a load-aware router sends less to a slowed replica and so
hides the harm from a comparison between replicas. Next step: ``budget`` keeps the breaker.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from dataclasses import dataclass, field

from rose_core.stats import quantile

SAMPLE_FLOOR = 30
_NORMAL = 1.645  # two-sided 90 %


@dataclass(frozen=True)
class Schedule:
    """Alternating windows.

    Attributes:
        seconds: length of a window; 0 = never withhold.
        every: one of so many windows is withheld: of two the second, of more one that is drawn by
            their number. A fixed place would meet a load of the same period at the same phase
            again and again.
    """

    seconds: float = 0.0
    every: int = 2

    def window(self, now_s: float) -> int:
        """Number of the window that contains this moment."""
        return int(now_s / self.seconds) if self.seconds else 0

    def withheld(self, now_s: float) -> bool:
        """Whether lending is withheld in the window of this moment."""
        if not self.seconds:
            return False
        block, place = divmod(self.window(now_s), self.every)
        # In pairs each withheld window has a lent neighbour, which is what a trial compares.
        return place == (1 if self.every == 2 else zlib.crc32(b"%d" % block) % self.every)


RELATIVE = Schedule(10.0, every=10)
"""For pools with a relative limit, where none was chosen: without windows it cannot be judged."""


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
    """TTFT and TPOT (seconds) of the last ``keep`` requests per window class."""

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
        meter: the replica's lent and withheld windows.
        unlent: the pool's replicas that lend nothing.
        max_increase: 0 = no limit, never judged.
        q: which quantile.
    """
    if not max_increase:
        return Harm()
    lent = meter.samples(withheld=False)
    controls = [("withheld windows", meter.samples(withheld=True))]
    if unlent is not None:
        controls.append(("un-lent replicas", unlent.samples(withheld=True)))
    for name, control in controls:
        found = [compare(one, two, q) for one, two in zip(lent, control, strict=True)]
        lows = [ratio.low for ratio in found if ratio.low is not None]
        if lows:
            return Harm(name, any(low > 1 + max_increase for low in lows))
    return Harm()
