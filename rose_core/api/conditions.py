"""How a condition changes: its time moves only when its status does.

``merge`` is what makes a restart a no-op: the same statements about the same object give the same
list, byte for byte, whenever and by whomever they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from rose_core.api.common import Condition
from rose_core.api.reasons import ConditionType, Reason

_MESSAGE_LIMIT = 1024


@dataclass(frozen=True)
class Statement:
    """What the operator says now about one condition; ``holds`` None is Unknown.

    Attributes:
        moving: the message holds figures that move all the time; it is kept while status and
            reason stay, so that figures alone cause no write.
    """

    type: ConditionType
    holds: bool | None
    reason: Reason
    message: str = ""
    moving: bool = False

    @property
    def status(self) -> str:
        """``True``, ``False`` or ``Unknown``."""
        return "Unknown" if self.holds is None else str(self.holds)


def timestamp(now: datetime) -> str:
    """RFC 3339 in UTC with seconds, as Kubernetes writes it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def merge(
    old: Iterable[Condition], statements: Iterable[Statement], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The new list of conditions: times of unchanged statuses stay."""
    before = {condition.type: condition for condition in old}
    return tuple(
        _one(before.get(statement.type), statement, generation, now) for statement in statements
    )


def _one(old: Condition | None, statement: Statement, generation: int, now: datetime) -> Condition:
    same = old is not None and old.status == statement.status
    keep = statement.moving and same and old is not None and old.reason == statement.reason
    return Condition(
        type=statement.type,
        status=statement.status,
        reason=statement.reason,
        message=old.message if keep and old else statement.message[:_MESSAGE_LIMIT],
        last_transition_time=old.last_transition_time if same and old else timestamp(now),
        observed_generation=generation,
    )


def transitions(old: Iterable[Condition], new: Iterable[Condition]) -> tuple[Condition, ...]:
    """The conditions whose status or reason changed: what deserves an Event."""
    before = {condition.type: (condition.status, condition.reason) for condition in old}
    return tuple(
        condition
        for condition in new
        if before.get(condition.type) != (condition.status, condition.reason)
    )


def find(conditions: Iterable[Condition], kind: ConditionType) -> Condition | None:
    """The condition of this type, if the list has it."""
    return next((condition for condition in conditions if condition.type == kind), None)
