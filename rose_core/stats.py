"""Intervals and quantiles: one place for what benchmarks, simulator and guard say of samples.

| figure | from | interval |
|---|---|---|
| quantile | values | none; linear interpolation (type 7 of Hyndman and Fan, numpy's default) |
| mean | values of independent runs | Student's t, 95 % |
| ratio of paired values | logs of the ratios | Student's t, 95 % |
| share | k of n | Wilson, 95 % |
| share of members that come in groups | k of n by group | Wilson's with the effective size, 95 % |
| difference of two shares | their intervals | Newcombe 1998, 95 % |
| what the next value does not exceed | the last values | adaptive conformal (Gibbs, Candes 2021) |
| share, looked at all the time | k of n | confidence sequence: Robbins' mixture (1970) |

Members of a group resemble each other, so n members say less than n independent ones. The effective
size is n over the design effect (Kish 1965), which the spread between groups tells; where no group
differs (all kept, or all lost) nothing tells it, and members are taken for copies. It is corrected
for few groups as Korn and Graubard (1998) do.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

Z95 = 1.959964
_ADAPT = 0.2  # of what may miss, by which a miss cuts it: five in a row leave nothing
# Times what may miss: what long calm has saved is spent within 25 values' worth.
_MOST_ALLOWED = 5.0
_BEYOND = 1.1  # times the largest value, for each miss after nothing is left
_MOST_BEYOND = 100.0  # such misses: 13,780 times the largest, so that the figure stays one
_STUDENT = (12.706, 4.303)  # 97.5 % quantiles with one and two degrees of freedom
_MOST_GROUPS = 4096  # that may still grow; one that comes back later counts as another


class Interval(msgspec.Struct, frozen=True):
    """A mean with its 95 % interval; the ends are None with a single pair."""

    mean: float
    low: float | None
    high: float | None
    pairs: int


def quantile(values: Sequence[float], q: float) -> float:
    """Quantile by linear interpolation; ``values`` must not be empty."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    index = int(position)
    rest = position - index
    upper = ordered[min(index + 1, len(ordered) - 1)]
    return ordered[index] * (1 - rest) + upper * rest


@dataclass(frozen=True, slots=True)
class Recent:
    """The last values, and what the next one does not exceed; also where they drift.

    Split conformal prediction (Vovk et al., 2005) holds what it claims while values are
    exchangeable: of n + 1 the last lies above the ``ceil((n + 1) level)``-th smallest of the others
    with a chance of at most 1 - level. Where their level or spread moves, the last ones are too
    small for the next. Adaptive conformal inference (Gibbs and Candes, 2021) corrects that by what
    it has missed: the share that may miss is cut by each miss and grows with each value that was
    covered, so that both balance at the claim:

        allowed += step x ((1 - level) - missed),        step = (1 - level) / 5

    Once nothing is left to allow, it answers more than any value that it knows, by a tenth for each
    further miss. So of T values in a row at most ``(1 - level) T + 26`` are missed, and one more
    for each tenth by which they outgrow all before, whatever comes: the steps' sum has a bound.

    ``adjustment`` is what was added so far: a number that the owner keeps for each level that it
    asks for, 0 at first. Adding copies the values, which is less than sorting them.

    Attributes:
        values: oldest first, positive.
        ordered: the same, smallest first.
    """

    values: tuple[float, ...] = ()
    ordered: tuple[float, ...] = ()

    def add(self, value: float, most: int) -> Recent:
        """With one more, of which the last ``most`` are kept."""
        values, ordered = self.values, list(self.ordered)
        if len(values) >= most:
            del ordered[bisect_left(ordered, values[0])]
            values = values[1:]
        insort(ordered, value)
        return Recent((*values, value), tuple(ordered))

    def bound(self, level: float, adjustment: float = 0.0) -> float:
        """What the next value does not exceed with a chance of ``level``.

        With fewer values than ``level / (1 - level)`` it is the largest; its level is n / (n + 1).

        Raises:
            ValueError: there are none.
        """
        count, allowed = len(self.ordered), 1 - level + adjustment
        if not count:
            message = "no values, nothing to expect of the next"
            raise ValueError(message)
        rank = math.ceil((count + 1) * (1 - max(0.0, allowed)) - 1e-9)
        found = self.ordered[min(max(rank, 1), count) - 1]
        return found * math.pow(_BEYOND, max(0.0, -allowed) / (_ADAPT * (1 - level)))

    @staticmethod
    def adjust(adjustment: float, level: float, *, missed: bool) -> float:
        """The adjustment after a value that was above its bound, or was not."""
        share = 1 - level
        adjusted = adjustment + _ADAPT * share * (share - missed)
        return max(-(1 + _ADAPT * _MOST_BEYOND) * share, min((_MOST_ALLOWED - 1) * share, adjusted))


def mean_of(values: Sequence[float]) -> Interval:
    """Arithmetic mean of independent runs' values, with Student's interval.

    Raises:
        ValueError: there are none.
    """
    if not values:
        message = "no values, no mean"
        raise ValueError(message)
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, None, None, 1)
    half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def paired_ratio(ours: Sequence[float], others: Sequence[float]) -> Interval:
    """Geometric mean of ``ours / others`` of paired seeds, Student's interval of the log.

    Raises:
        ValueError: the lists differ in length, are empty or hold a value that is not positive.
    """
    if len(ours) != len(others) or not ours or min(*ours, *others) <= 0:
        message = f"pairs of positive values expected, got {list(ours)} and {list(others)}"
        raise ValueError(message)
    log = mean_of([math.log(a / b) for a, b in zip(ours, others, strict=True)])
    if log.low is None or log.high is None:
        return Interval(math.exp(log.mean), None, None, 1)
    return Interval(math.exp(log.mean), math.exp(log.low), math.exp(log.high), log.pairs)


@dataclass(frozen=True, slots=True)
class Share:
    """A share or difference with its bounds."""

    value: float
    low: float
    high: float


def wilson(hits: float, count: float) -> Share:
    """The share ``hits / count`` with its 95 % interval; of nothing everything is possible."""
    if not count:
        return Share(math.nan, 0.0, 1.0)
    share, z2 = hits / count, Z95 * Z95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = Z95 / (1 + z2 / count)
    spread *= math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return Share(share, max(0.0, middle - spread), min(1.0, middle + spread))


def mixture_sequence(hits: int, count: int, alpha: float = 0.05) -> Share:
    """The share with bounds that hold at every look at once, with a chance of 1 - alpha.

    Robbins' beta-binomial mixture with Jeffreys' prior: the bounds hold the shares under which the
    mixture's likelihood ratio is below 1 / alpha (Ville's inequality).
    """
    if not count:
        return Share(math.nan, 0.0, 1.0)
    misses, share = count - hits, hits / count

    def believable(value: float) -> bool:
        if (value <= 0 and hits) or (value >= 1 and misses):
            return False
        log_likelihood = hits * math.log(value) if hits else 0.0
        log_likelihood += misses * math.log1p(-value) if misses else 0.0
        mixed = _log_beta(hits + 0.5, misses + 0.5) - _log_beta(0.5, 0.5)
        return mixed - log_likelihood < -math.log(alpha)

    return Share(share, _edge(believable, share, 0.0), _edge(believable, share, 1.0))


def _log_beta(one: float, other: float) -> float:
    return math.lgamma(one) + math.lgamma(other) - math.lgamma(one + other)


def _edge(believable: Callable[[float], bool], inside: float, outside: float) -> float:
    """Where believing ends between the two, to 1e-9; ``outside`` itself if it does not."""
    if believable(outside):
        return outside
    while abs(outside - inside) > 1e-9:
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if believable(middle) else (inside, middle)
    return outside


def newcombe(one: Share, other: Share) -> Share:
    """``one - other`` with its 95 % interval, from the intervals of two independent shares."""
    gap = one.value - other.value
    if math.isnan(gap):
        return Share(math.nan, one.low - other.high, one.high - other.low)
    low = math.hypot(one.value - one.low, other.high - other.value)
    high = math.hypot(one.high - one.value, other.value - other.low)
    return Share(gap, gap - low, gap + high)


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t, to 1 % (from 3 degrees on by Fisher's expansion)."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = Z95
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

    def __copy__(self) -> Clustered:
        """Another with the same members."""
        made = Clustered(self._most)
        vars(made).update(vars(self), _open=self._open.copy())
        return made

    def add(self, group: str, *, hit: bool, times: int = 1) -> None:
        """So many members of a group that are alike."""
        hits, count = self._open.pop(group, (0, 0))
        self.count += times
        self._counts2 += times * (2 * count + times)
        if hit:
            self.hits += times
            self._hits2 += times * (2 * hits + times)
            self._both += times * (hits + count + times)
            self._open[group] = hits + times, count + times
        else:
            self._both += times * hits
            self._open[group] = hits, count + times
        if not count:
            self.groups += 1
            if len(self._open) > self._most:
                self._open.popitem(last=False)

    def share(self) -> Share:
        """With its 95 % interval; one group alone says nothing of others."""
        if not self.count:
            return wilson(0, 0)
        share = self.hits / self.count
        if self.groups < 2:
            return Share(share, 0.0, 1.0)
        size = self._effective(share) * (Z95 / student(self.groups - 1)) ** 2
        return wilson(share * size, size)

    def _effective(self, share: float) -> float:
        """How many independent members would say as much."""
        alone = share * (1 - share) * self.count
        spread = self._hits2 - 2 * share * self._both + share * share * self._counts2
        spread *= self.groups / (self.groups - 1)
        if alone <= 0:  # all alike: nothing shows how much siblings resemble; taken for copies
            return self.count * self.count / self._counts2
        return min(float(self.count), self.count * alone / spread) if spread > 0 else self.count
