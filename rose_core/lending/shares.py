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
of a tenth, and by weight among those. What it brings follows from its router's report of its turns.
Turns spread over engines; a fuller engine gives more, and each turn on it less. With ``f`` the
share of an engine's places that are taken, it gives ``(1 + c) f / (1 + c f)`` of what it gives
full, where ``c`` is ``CROWDING``. A slot more spreads the same turns over one engine more:

| the lease's many engines are | a slot more brings |
|---|---|
| over-full: turns wait for a place | all that a full engine gives: 1 |
| half full | 0.48 |
| a quarter full | 0.24 |
| without turns | 0 |

It never grows with the slots held, so to give each slot to whom it brings most is the best use of
all of them (a greedy choice is optimal for a sum of concave functions). It is off: a lease whose
turns are few gets fewer slots than its weight says (docs/decisions/0630).

``place`` is what loans follow; ``targets`` is the same order played through for all slots of the
pool at once: what every lease is entitled to, from which rebalancing and explanations follow.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Final

from rose_core.lending.facts import Lease, PlannerPolicy

CROWDING: Final = 3.0
"""How much longer a full engine's step takes than an empty one's. With it a slot gives 0.54 of a
dedicated engine at 7.6 of 13 turns, 0.49 at 6.6 and 0.38 at 4.9; simulated were 0.58, 0.4 and 0.33
(docs/decisions/0119). Leases whose slots take equally many turns are in the same order with any."""

UNKNOWN: Final = 1.0
"""Of a lease whose router was not heard: unknown is not zero, nor less than what others have."""
Place = tuple[bool, int, float, float, float, str]


def work(turns: float, engines: float, places: int) -> float:
    """What so many turns make of so many equal engines, in full engines."""
    if turns <= 0 or engines <= 0:
        return 0.0
    full = min(1.0, turns / (engines * places))
    return engines * full * (1 + CROWDING) / (1 + CROWDING * full)


def gain(lease: Lease, held: int, deaf_seconds: float) -> float:
    """Of the lease's next slot when it holds this many, in full engines: 0 to 1.

    Args:
        lease: with its router's report.
        held: slots that it has.
        deaf_seconds: a router's report that is older says nothing.
    """
    asked = lease.demand
    if asked is None or asked.age_seconds > deaf_seconds:
        return UNKNOWN
    places = max(1, lease.turns_per_slot)
    turns = asked.turns or asked.usual_turns
    # The router says what its dedicated engines carry half full.
    engines = 2 * asked.dedicated_turns / places + held
    return work(turns, engines + 1, places) - work(turns, engines, places)


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
