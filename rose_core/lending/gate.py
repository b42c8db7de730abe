"""Is a loan worth what it costs? A slot gives nothing while its engine starts and takes weights.

A loan is made when it is expected to last at least ``borrow_gain`` times that cost. What ends it is
known for some causes: the pool's time window closes, the lease expires. (A rise of the load is the
outlook's: it makes no loan that the next ``lead_seconds`` would end.) Unknown causes are not
guessed: without a known end a loan is worth it.
"""

from __future__ import annotations

from rose_core.lending.facts import Lease, PlannerPolicy, PoolTerms
from rose_core.lending.limits import closes_at

_NEWEST_WEIGHT = 0.3
"""The newest start counts this much: weights grow and nodes warm up."""


def not_worth(lease: Lease, pool: PoolTerms, policy: PlannerPolicy, now: float) -> str:
    """Why a loan that is made now would not pay, with its numbers; empty when it does."""
    known = {
        "the time window closes": closes_at(pool, now),
        "the lease expires": lease.ends_at,
    }
    ends = {why: at for why, at in known.items() if at is not None}
    if not ends:
        return ""
    why, at = min(ends.items(), key=lambda entry: entry[1])
    cost = policy.toggle_seconds if lease.toggle_seconds is None else lease.toggle_seconds
    left = max(0.0, at - now)
    if left >= policy.borrow_gain * cost:
        return ""
    return f"{why} in {left:.0f} s; a loan takes {cost:.0f} s until it gives anything"


def usual_start(before: float | None, seconds: float) -> float:
    """What a loan to the lease usually costs, after one more took ``seconds`` until it ran.

    An exponentially weighted mean; ``before`` is what it said until now, None for the first start.
    """
    known = seconds if before is None else before
    return max(0.0, known + _NEWEST_WEIGHT * (seconds - known))
