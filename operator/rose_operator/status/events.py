"""Events: transitions of the conditions that people wait for, and slots that were taken back.

Pure. Next step: ``event_limits`` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from uuid import uuid4

from rose_core.api import Condition, ConditionType, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.common import API_VERSION, ObjectMeta
from rose_core.api.conditions import timestamp
from rose_operator.kube.api import FIELD_MANAGER, ObjectKind
from rose_operator.kube.object_cache import Raw
from rose_operator.plan.admission import Refusal

ApiResource = ServingPool | RolloutLease | RolloutSlot

_NEGATIVE = frozenset({ConditionType.RECLAIMING, ConditionType.PAUSED})
_REPORTED = (
    ConditionType.ACCEPTED,
    ConditionType.PAUSED,
    ConditionType.GRANTED,
    ConditionType.SERVING_PROTECTED,
    ConditionType.READY,
)
_MOST_NAME = 200
MOST_MESSAGE = 1024


def condition_to_report(changed: Iterable[Condition], resource: ApiResource) -> Condition | None:
    """The transition whose Event is the most important one; None when there is none.

    Of slots only trouble is reported: there are thousands, and their leases report the rest.
    """
    reported = [one for one in changed if _is_reported(one, resource)]
    return min(reported, key=lambda one: _REPORTED.index(ConditionType(one.type)), default=None)


def _is_reported(condition: Condition, resource: ApiResource) -> bool:
    if condition.type not in _REPORTED:
        return False
    if isinstance(resource, RolloutSlot):
        return condition.type == ConditionType.READY and _is_trouble(condition, resource)
    first = all(old.type != condition.type for old in resource.status.conditions)
    calm = condition.type in _NEGATIVE and condition.status == "False"
    return not (first and calm)


def _is_trouble(condition: Condition, slot: RolloutSlot) -> bool:
    was = any(old.type == "Ready" and old.status == "True" for old in slot.status.conditions)
    return was and condition.status != "True" and not slot.spec.release_reason


def condition_event(
    kind: ObjectKind, resource: ApiResource, condition: Condition, now: datetime
) -> Raw:
    """The Event of a transition."""
    good = (condition.status == "True") != (condition.type in _NEGATIVE)
    return _event(
        kind,
        resource.metadata,
        condition.reason,
        f"{condition.type}={condition.status} {condition.message}".strip(),
        warning=not good and condition.status != "Unknown",
        now=now,
    )


def unreadable_event(kind: ObjectKind, raw: Raw, refusal: Refusal, now: datetime) -> Raw:
    """The Event of an object that can be neither read nor given a status."""
    metadata = ObjectMeta.model_validate(raw["metadata"])
    return _event(kind, metadata, refusal.reason, refusal.message, warning=True, now=now)


def release_event(
    lease: RolloutLease, reason: str, slots: Iterable[str], message: str, now: datetime
) -> Raw:
    """The Event of slots that a lease loses in one pass for one reason."""
    names = ", ".join(sorted(slots))
    text = f"taken back: {names}: {message}"
    return _event(ObjectKind.LEASE, lease.metadata, reason, text, warning=False, now=now)


def _event(
    kind: ObjectKind,
    metadata: ObjectMeta,
    reason: str,
    message: str,
    *,
    warning: bool,
    now: datetime,
) -> Raw:
    when = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata.name[:_MOST_NAME]}.{uuid4().hex[:12]}",
            "namespace": metadata.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": kind.value,
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
        },
        "reason": reason,
        "message": message[:MOST_MESSAGE],
        "type": "Warning" if warning else "Normal",
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
