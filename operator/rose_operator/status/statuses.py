"""What every status shares: merging conditions, the word about acceptance.

The statuses are pure functions of the world and the plan: ``pool_status``, ``slot_status``,
``lease_status``. The same world gives the same status byte for byte, which is why a restart writes
nothing.
"""

from __future__ import annotations

from datetime import datetime

from rose_core.api import Condition, ConditionType, Reason, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.conditions import Statement, merge
from rose_operator.plan.admission import Refusal


def conditions(
    resource: ServingPool | RolloutLease | RolloutSlot, statements: list[Statement], now: datetime
) -> tuple[Condition, ...]:
    """The object's conditions after these statements."""
    generation = resource.metadata.generation
    return merge(resource.status.conditions, statements, generation=generation, now=now)


def accepted(refusal: Refusal | None) -> Statement:
    """Whether admission takes the object."""
    if refusal is None:
        return Statement(ConditionType.ACCEPTED, True, Reason.ACCEPTED)
    return Statement(ConditionType.ACCEPTED, False, refusal.reason, refusal.message)


def reason_of(text: str) -> Reason:
    """A reason that was written earlier, perhaps by another version of the operator."""
    try:
        return Reason(text)
    except ValueError:
        return Reason.OTHER
