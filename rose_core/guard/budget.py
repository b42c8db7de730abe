"""How fast a pool's error budget burns, and the breaker that pauses lending.

Multiwindow burn-rate alerting (Google's Site Reliability Workbook, chapter 5, "Alerting on SLOs")
with minutes in the place of hours: the remedy is automatic. A percentile of 99 allows one slow
request in a hundred. The burn is the share of slow requests divided by that allowance: 1 uses the
budget up exactly. Two windows must agree, so that neither one bad second nor a bad minute that has
passed opens the breaker; below the floors nothing is judged.

| state | seen | next |
|---|---|---|
| closed | burn >= 2 in both windows, >= 30 requests and >= 3 slow ones in the long one | open |
| closed | harm proven (``crossover``) | open |
| open | until ``rest_ns`` after its last cause | open |
| open | later | closed |

A burning budget opens it whoever burns: lending cannot make it better. How many of the slow
requests had met an open gate at all is counted beside it, because lending is not blamed without
evidence. Next step: the guard and the simulator spend it with what ``experience`` compared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rose_core.guard.experience import RequestExposure

BUDGET_CAUSE = "error-budget"
SAMPLE_FLOOR = 30  # below it a share of slow requests is chance
SLOW_FLOOR = 3  # one or two slow requests are no rate, however few there were
_BUCKET_NS = 5_000_000_000  # a window's edge may be off by this: a twelfth of the short one


@dataclass(frozen=True)
class BurnLimits:
    """Windows, the burn that opens the breaker, and how long it stays open; nanoseconds."""

    long_ns: int = 300_000_000_000
    short_ns: int = 60_000_000_000
    burn: float = 2.0
    rest_ns: int = 300_000_000_000


@dataclass
class _Bucket:
    start_ns: int
    requests: int = 0
    slow: int = 0
    exposed: int = 0


@dataclass(frozen=True)
class Burn:
    """How fast the budget burnt in one window.

    Attributes:
        rate: None below the sample floor.
        exposed: slow requests that met an open gate.
    """

    rate: float | None
    requests: int
    slow: int
    exposed: int


class BurnMeter:
    """Slow and finished requests of one pool on this node; single-threaded."""

    def __init__(self, limits: BurnLimits | None = None) -> None:
        self._limits = limits or BurnLimits()
        self._buckets: deque[_Bucket] = deque()

    def add(self, *, slow: bool, exposed: bool, now_ns: int) -> None:
        """Note one finished request; ``exposed`` = it met an open gate."""
        start = now_ns - now_ns % _BUCKET_NS
        if not self._buckets or self._buckets[-1].start_ns < start:
            self._buckets.append(_Bucket(start))
            while self._buckets[0].start_ns < now_ns - self._limits.long_ns:
                self._buckets.popleft()
        bucket = self._buckets[-1]
        bucket.requests += 1
        bucket.slow += slow
        bucket.exposed += slow and exposed

    def burn(self, percentile: int, window_ns: int, now_ns: int) -> Burn:
        """The burn over the last ``window_ns``."""
        recent = [b for b in self._buckets if b.start_ns >= now_ns - window_ns]
        requests, slow = sum(b.requests for b in recent), sum(b.slow for b in recent)
        allowed = max(1e-6, 1 - percentile / 100)
        rate = slow / requests / allowed if requests >= SAMPLE_FLOOR else None
        return Burn(rate, requests, slow, sum(b.exposed for b in recent))

    def burning(self, percentile: int, now_ns: int) -> bool:
        """Both windows are over the limit, on enough requests."""
        limits = self._limits
        long = self.burn(percentile, limits.long_ns, now_ns)
        short = self.burn(percentile, limits.short_ns, now_ns)
        if long.rate is None or long.slow < SLOW_FLOOR or long.rate < limits.burn:
            return False
        # Few requests in the short window say nothing against the long one, unless none was slow.
        return short.slow > 0 if short.rate is None else short.rate >= limits.burn


@dataclass(frozen=True)
class BudgetBreaker:
    """Lending of a pool rests until ``until_ns``; ``cause`` says why it was opened last."""

    until_ns: int = 0
    cause: str = ""

    def open(self, now_ns: int) -> bool:
        """Whether lending is paused now."""
        return now_ns < self.until_ns

    def trip(self, cause: str, now_ns: int, limits: BurnLimits) -> BudgetBreaker:
        """Open it, or keep it open for another rest."""
        return BudgetBreaker(now_ns + limits.rest_ns, cause)


@dataclass
class ErrorBudget:
    """Error budget and breaker of one pool."""

    limits: BurnLimits = field(default_factory=BurnLimits)
    burn: BurnMeter = field(default_factory=BurnMeter)
    breaker: BudgetBreaker = field(default_factory=BudgetBreaker)

    def spend(self, met: RequestExposure, percentile: int, now_ns: int) -> bool:
        """Take one request that was compared with its SLO.

        Returns:
            It was slow and the budget burns: the breaker ought to be opened.
        """
        self.burn.add(slow=met.slow, exposed=met.exposed, now_ns=now_ns)
        return met.slow and self.burn.burning(percentile, now_ns)

    def trip(self, cause: str, now_ns: int) -> bool:
        """Open the breaker, or keep it open.

        Returns:
            It was closed before.
        """
        fresh = not self.breaker.open(now_ns)
        self.breaker = self.breaker.trip(cause, now_ns, self.limits)
        return fresh
