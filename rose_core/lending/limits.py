"""How many replicas of a pool may be lent, and when.

The outlook's limit has a dead band: loans stay until the expected peak needs their replica, and are
made only when it would not need it even if it came out a tenth higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rose_core.api.reasons import Reason
from rose_core.lending.facts import DailyWindow, LoadOutlook, PoolTerms

_MARGIN = 1.1  # more is lent only with a tenth to spare; less at once: a dead band between both
_DAYS = 7  # windows repeat by the week, so whoever looks so far ahead has seen them all


@dataclass(frozen=True)
class Limit:
    """Most replicas that may be lent, and which rule says so."""

    count: int
    reason: Reason
    message: str


def most_lent(pool: PoolTerms, replicas: int) -> int:
    """Most replicas of the pool that the owner's fixed limits allow when it has this many."""
    by_percent = replicas * pool.max_replicas_percent // 100
    return max(0, min(by_percent, replicas - pool.min_unlent_replicas))


def limit(pool: PoolTerms, replicas: int, *, growing: bool) -> Limit:
    """The tightest limit of a pool of this size, for a loan that would be made or that exists."""
    most = most_lent(pool, replicas)
    text = (
        f"the pool lends {most} of {replicas} replicas at most (maxReplicasPercent "
        f"{pool.max_replicas_percent}, minUnlentReplicas {pool.min_unlent_replicas})"
    )
    fixed = Limit(most, Reason.POOL_LIMIT_REACHED, text)
    if pool.outlook is None:
        return fixed
    expected = by_outlook(pool.outlook, replicas, _MARGIN if growing else 1.0)
    return min(fixed, expected, key=lambda one: one.count)


def by_outlook(outlook: LoadOutlook, replicas: int, margin: float = 1.0) -> Limit:
    """What the expected peak leaves over."""
    busy = min(1000.0, outlook.peak_permille * margin)
    needed = -(-replicas * busy // max(1, outlook.max_busy_permille))
    text = (
        f"{min(replicas, int(needed))} of {replicas} replicas must carry a peak of "
        f"{outlook.peak_permille} permille busy within {outlook.lead_seconds / 60:.0f} min"
    )
    return Limit(max(0, replicas - int(needed)), Reason.PEAK_EXPECTED, text)


def is_open(pool: PoolTerms, now: float) -> bool:
    """Whether one of the pool's time windows is open; no windows means always."""
    moment = datetime.fromtimestamp(now, UTC)
    return not pool.windows or any(_ends(window, moment) for window in pool.windows)


def opens_at(pool: PoolTerms, now: float) -> datetime | None:
    """When the next window begins, for a pool of which none is open; None for never."""
    moment = datetime.fromtimestamp(now, UTC)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    days = [midnight + timedelta(days=number) for number in range(_DAYS + 1)]
    begins = (
        day + timedelta(minutes=window.start_minute)
        for window in pool.windows
        for day in days
        if day.weekday() in window.days
    )
    return min((begin for begin in begins if begin > moment), default=None)


def closes_at(pool: PoolTerms, now: float) -> float | None:
    """When lending must end because no window is open any more; None for never.

    Windows that meet are followed from one to the next, for a week at most.
    """
    if not pool.windows:
        return None
    moment = start = datetime.fromtimestamp(now, UTC)
    while moment - start < timedelta(days=_DAYS):
        ends = [end for window in pool.windows if (end := _ends(window, moment))]
        if not ends:
            return moment.timestamp()
        moment = max(ends)
    return None


def _ends(window: DailyWindow, moment: datetime) -> datetime | None:
    """When the window that is open at this moment closes, None when it is not open."""
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    for begun in (midnight, midnight - timedelta(days=1)):
        start = begun + timedelta(minutes=window.start_minute)
        length = (window.end_minute - window.start_minute) % 1440
        end = start + timedelta(minutes=length)
        if begun.weekday() in window.days and start <= moment < end:
            return end
    return None
