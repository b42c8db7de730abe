"""How many replicas of a pool may be lent, and when."""

from __future__ import annotations

from datetime import UTC, datetime

from rose_core.lending.facts import Pool, Window


def most_lent(pool: Pool, replicas: int) -> int:
    """Most replicas of the pool that may be lent when it has this many."""
    by_percent = replicas * pool.max_replicas_percent // 100
    return max(0, min(by_percent, replicas - pool.min_unlent_replicas))


def is_open(pool: Pool, now: float) -> bool:
    """Whether one of the pool's time windows is open; no windows means always."""
    moment = datetime.fromtimestamp(now, UTC)
    minute = moment.hour * 60 + moment.minute
    return not pool.windows or any(
        _inside(window, moment.weekday(), minute) for window in pool.windows
    )


def _inside(window: Window, day: int, minute: int) -> bool:
    if window.start_minute < window.end_minute:
        return day in window.days and window.start_minute <= minute < window.end_minute
    if minute >= window.start_minute:
        return day in window.days
    return minute < window.end_minute and (day - 1) % 7 in window.days
