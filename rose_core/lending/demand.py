"""Slots that a lease wants now, by its router's report, from ``slots.min`` to ``slots.max``.

| the router says | wanted | reason |
|---|---|---|
| nothing, or nothing lately | ``slots.max``: unknown is not zero | |
| turns are live or waiting | slots that they fill to a half; those held, down to a quarter | |
| none for less than ``idleSeconds`` | what it holds, lost ones back to ``slots.min`` | |
| none, and a version came after the last one, within ``idleSeconds`` | the usual number | |
| none, and the next are expected before an engine could start again | the usual number | |
| none yet, and the lease is young | ``slots.max`` | |
| none yet, and the router is young (it was started again) | the same | |
| none otherwise | 0 | ``Idle`` |

Any other number below ``slots.max`` has the reason ``FewerWanted``.

*To a half*: beside a slot that is less than half full, a further one adds less than half of what
the first gave (docs/decisions/0119). The gap between a half and a quarter, and a router that names
the peak of its last minute, keep slots from flapping. *When to give back* is ski rental: who holds
on for as long as a new start would cost pays at most twice what a clairvoyant does (Karlin et al.,
"Competitive snoopy caching", 1988), hence the default of ``slots.idleSeconds``. *When to ask again*
is the rhythm's (``rose_core.rollouts.training.rhythm``) less what a start takes.

What routers say is put together here too (``together``), for the operator and for the simulator.
What several leases want is shared by ``shares``. Next step: ``plan`` bounds every lease by this
before it decides anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rose_core.api.reasons import Reason
from rose_core.lending.facts import Demand, Lease, PlannerPolicy, Snapshot
from rose_core.wire.routing import DemandNote


@dataclass(frozen=True)
class ReceivedNote:
    """One note, and when it came."""

    note: DemandNote
    at: float


@dataclass(frozen=True)
class WantedSlots:
    """The answer.

    Attributes:
        reason: why it is less than ``slots.max``; None when it is not.
        message: the numbers behind it.
    """

    slots: int
    reason: Reason | None = None
    message: str = ""


def by_demand(snapshot: Snapshot, now: float) -> Snapshot:
    """The snapshot with every lease's minimum and maximum bounded by what it wants."""
    held = Counter(slot.lease for slot in snapshot.slots if not slot.released)
    leases = (_bounded(one, held[one.key], snapshot.policy, now) for one in snapshot.leases)
    return replace(snapshot, leases=tuple(leases))


def _bounded(lease: Lease, held: int, policy: PlannerPolicy, now: float) -> Lease:
    found = want(lease, held, policy, now)
    return replace(
        lease,
        min_slots=min(lease.min_slots, found.slots),
        max_slots=found.slots,
        reduced=found.reason,
        reduced_text=found.message,
    )


def want(lease: Lease, held: int, policy: PlannerPolicy, now: float) -> WantedSlots:
    """Slots that the lease wants when it holds that many."""
    if lease.suspended:
        return WantedSlots(0, Reason.SUSPENDED, "spec.suspend is true")
    asked = lease.demand
    if asked is None or asked.age_seconds > policy.deaf_seconds:
        return WantedSlots(lease.max_slots)
    # Turns are the last minute's peak: somebody who asks for less patience than that gets it.
    if asked.turns and (asked.idle_seconds is None or asked.idle_seconds < lease.idle_seconds):
        return _for_turns(lease, asked, held)
    if asked.idle_seconds is None and now - lease.created < policy.first_seconds:
        return WantedSlots(lease.max_slots)
    return _without_turns(lease, asked, held, policy)


def _without_turns(lease: Lease, asked: Demand, held: int, policy: PlannerPolicy) -> WantedSlots:
    idle = asked.up_seconds if asked.idle_seconds is None else asked.idle_seconds
    if idle < lease.idle_seconds:
        # A pause takes no first slot and is no wish for fewer: what a failure takes comes back.
        kept = max(held, lease.min_slots) if held else 0
        return _at_most(lease, kept, "there is no turn just now")
    usual = _for_turns(lease, replace(asked, turns=asked.usual_turns), held)
    published = asked.published_seconds
    if published is not None and published < lease.idle_seconds:
        return usual
    # What is given back now would have to start again at once; what is not there has to start now.
    start = policy.toggle_seconds if lease.toggle_seconds is None else lease.toggle_seconds
    lead = start * (policy.borrow_gain if held else 1.0) + policy.ready_seconds
    if asked.expected_seconds is not None and asked.expected_seconds <= lead:
        return usual
    return WantedSlots(0, Reason.IDLE, _idle_text(lease, asked))


# Messages stand in statuses: a figure that moves by itself would be a write in every pass.


def _idle_text(lease: Lease, asked: Demand) -> str:
    text = f"no turn for slots.idleSeconds ({lease.idle_seconds:.0f} s); turns bring slots back"
    if asked.expected_seconds is None:
        return text
    return f"{text}, and so does the next step, before it begins"


def _for_turns(lease: Lease, asked: Demand, held: int) -> WantedSlots:
    turns = max(0, asked.turns - asked.dedicated_turns)
    grown = -(-turns // max(1, lease.turns_per_slot // 2))
    kept = min(held, -(-turns // max(1, lease.turns_per_slot // 4)))
    found = max(1, lease.min_slots, grown, kept)
    return _at_most(
        lease, found, f"its turns can use no more (maxTrajectoriesPerSlot {lease.turns_per_slot})"
    )


def _at_most(lease: Lease, slots: int, why: str) -> WantedSlots:
    """So many, or ``slots.max``, which needs no reason."""
    if slots >= lease.max_slots:
        return WantedSlots(lease.max_slots)
    return WantedSlots(slots, Reason.FEWER_WANTED, why)


def together(received: Sequence[ReceivedNote], now: float) -> Demand | None:
    """What several replicas say, as if one had all turns; None for none."""
    if not received:
        return None
    aged = [(one.note, now - one.at) for one in received]
    return Demand(
        turns=sum(note.peak_turns for note, _ in aged),
        usual_turns=sum(note.usual_turns for note, _ in aged),
        dedicated_turns=sum(note.dedicated_turns for note, _ in aged),
        idle_seconds=_least(_older(note.idle_seconds, age) for note, age in aged),
        published_seconds=_least(_older(note.published_seconds, age) for note, age in aged),
        expected_seconds=_least(_sooner(note.expected_seconds, age) for note, age in aged),
        up_seconds=max(note.up_seconds + age for note, age in aged),
        age_seconds=max(age for _, age in aged),
    )


def _older(seconds: float | None, age: float) -> float | None:
    return None if seconds is None else seconds + age


def _sooner(seconds: float | None, age: float) -> float | None:
    return None if seconds is None else max(0.0, seconds - age)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
