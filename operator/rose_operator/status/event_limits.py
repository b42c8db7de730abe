"""Events are written sparingly, as Kubernetes' own recorder does: what flaps is reported seldom.

| Events of an object | then |
|---|---|
| up to ``BURST`` in a row | written |
| more | left out, until one may be written again every ``REFILL_SECONDS`` |
| the next one that is written | says how many were left out before it |

Conditions are not touched by this: a status always says what holds. Next step: ``events`` makes the
Events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rose_operator.errors import OperatorError
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import Raw
from rose_operator.metrics import EVENTS_LEFT_OUT
from rose_operator.status.events import MOST_MESSAGE

_log = logging.getLogger(__name__)
BURST = 25
REFILL_SECONDS = 300.0


class EventApi(Protocol):
    """What Events need of the API server."""

    async def create(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Create."""


@dataclass
class _Budget:
    """Events that an object has left, as of a moment, and those that were left out since."""

    left: float
    at: float
    omitted: int = 0

    def take(self, now: float) -> bool:
        """Whether another one may be written now."""
        self.left = min(float(BURST), self.left + (now - self.at) / REFILL_SECONDS)
        self.at = now
        if self.left < 1:
            self.omitted += 1
            return False
        self.left -= 1
        return True


class EventLimiter:
    """Writes Events, to each object within its budget.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, api: EventApi, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._budgets: dict[str, _Budget] = {}

    async def emit(self, event: Raw) -> bool:
        """Write an Event; losing it harms nobody.

        Returns:
            Whether it was written.
        """
        now = self._clock()
        budget = self._budgets.setdefault(_object_of(event), _Budget(BURST, now))
        if not budget.take(now):
            EVENTS_LEFT_OUT.inc()
            return False
        omitted, budget.omitted = budget.omitted, 0
        try:
            await self._api.create(ObjectKind.EVENT, _with_count(event, omitted))
        except OperatorError as error:
            _log.warning("Event %s not written: %s", event["reason"], error)
            return False
        return True

    def keep(self, objects: set[str]) -> None:
        """Forget objects (``Kind namespace/name``) that are gone."""
        self._budgets = {key: kept for key, kept in self._budgets.items() if key in objects}


def _object_of(event: Raw) -> str:
    involved = event["involvedObject"]
    return f"{involved['kind']} {involved['namespace']}/{involved['name']}"


def _with_count(event: Raw, omitted: int) -> Raw:
    if not omitted:
        return event
    note = f" ({omitted} Events before it were left out)"
    return {**event, "message": event["message"][: MOST_MESSAGE - len(note)] + note}
