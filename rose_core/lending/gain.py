"""What one slot more would bring a lease, from what its router says of its turns (pure).

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
all of them (a greedy choice is optimal for a sum of concave functions). Next step: ``shares``
orders leases by it where ``Policy.by_gain`` says so.
"""

from __future__ import annotations

from typing import Final

from rose_core.lending.facts import Lease

CROWDING: Final = 3.0
"""How much longer a full engine's step takes than an empty one's. With it a slot gives 0.54 of a
dedicated engine at 7.6 of 13 turns, 0.49 at 6.6 and 0.38 at 4.9; simulated were 0.58, 0.4 and 0.33
(docs/decisions/0119). Leases whose slots take equally many turns are in the same order with any."""

UNKNOWN: Final = 1.0
"""Of a lease whose router was not heard: unknown is not zero, nor less than what others have."""


def work(turns: float, engines: float, places: int) -> float:
    """What so many turns make of so many equal engines, in full engines."""
    if turns <= 0 or engines <= 0:
        return 0.0
    full = min(1.0, turns / (engines * places))
    return engines * full * (1 + CROWDING) / (1 + CROWDING * full)


def gain(lease: Lease, held: int, deaf_seconds: float) -> float:
    """Of the lease's next slot when it holds this many, in full engines: 0 to 1.

    Args:
        lease: with its router's word.
        held: slots that it has.
        deaf_seconds: what a router said longer ago says nothing.
    """
    asked = lease.demand
    if asked is None or asked.age_seconds > deaf_seconds:
        return UNKNOWN
    places = max(1, lease.turns_per_slot)
    turns = asked.turns or asked.usual_turns
    # The router says what its dedicated engines carry half full.
    engines = 2 * asked.dedicated_turns / places + held
    return work(turns, engines + 1, places) - work(turns, engines, places)
