"""How the leases of a pool share what may be lent: weighted max-min fairness over wanted slots.

Three rules, in this order; each slot goes to the lease that the rules name next:

1. minimums, by priority and then by age;
2. a higher priority takes all it wants before a lower one gets more than its minimum;
3. inside a priority, by weight: the lease with the fewest slots per weight is next.

Rule 3 is progressive filling (Bertsekas and Gallager, "Data Networks", 6.5.2): nobody gets more
than he wants (``demand``), and nobody's share can grow but at the cost of one that is smaller per
weight. A slot is all that a lease is given, so this is also what dominant resource fairness (Ghodsi
et al., 2011) comes to.

With ``PlannerPolicy.by_gain`` rule 3 asks first to whom a slot brings most, times weight, in steps
of a tenth (``gain``), and by weight among those. It is off: a lease whose turns are few gets fewer
slots than its weight says (docs/decisions/0630).

``place`` is what loans follow; ``targets`` is the same order played through for all slots of the
pool at once: what every lease is entitled to, from which rebalancing and explanations follow.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from rose_core.lending.facts import Lease, PlannerPolicy
from rose_core.lending.gain import gain

Place = tuple[bool, int, float, float, float, str]


def place(lease: Lease, held: int, policy: PlannerPolicy) -> Place:
    """Sort key of the lease's next slot when it holds this many; the least is served next."""
    below = held < lease.min_slots
    share = 0.0 if below else (held + 1) / lease.weight
    brings = 0.0
    if policy.by_gain and not below:
        # Finer differences are noise: a slot would move with each turn that comes or goes.
        brings = lease.weight * round(gain(lease, held, policy.deaf_seconds), 1)
    return (not below, -lease.priority, -brings, share, lease.created, lease.key)


def targets(
    leases: Iterable[Lease], slots: int, caps: Mapping[str, int], policy: PlannerPolicy
) -> dict[str, int]:
    """Lease key -> slots it is entitled to when the pool may lend this many.

    Args:
        leases: of one pool; those that are not accepted get none.
        slots: how many the pool may lend.
        caps: most slots a lease may hold, besides its own maximum.
        policy: how those of one priority are ordered.
    """
    able = {one.key: one for one in leases if one.refusal is None}
    given = dict.fromkeys(able, 0)
    queue = [place(one, 0, policy) for one in able.values() if _most(one, caps) > 0]
    heapq.heapify(queue)
    for _ in range(max(0, slots)):
        if not queue:
            break
        lease = able[heapq.heappop(queue)[-1]]
        given[lease.key] += 1
        if given[lease.key] < _most(lease, caps):
            heapq.heappush(queue, place(lease, given[lease.key], policy))
    return given


def _most(lease: Lease, caps: Mapping[str, int]) -> int:
    return min(lease.max_slots, caps.get(lease.key, lease.max_slots))
