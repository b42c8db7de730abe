"""Statuses, Events and metrics of a pass; a status is written only when it differs.

Events tell transitions of the conditions that people wait for, at most one per object and pass.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol
from uuid import uuid4

from pydantic import ValidationError

from rose_core.api import (
    ApiModel,
    Condition,
    ConditionType,
    LeaseStatus,
    Reason,
    RolloutLease,
    RolloutSlot,
    ServingPool,
    SlotStatus,
)
from rose_core.api.common import API_VERSION
from rose_core.api.conditions import Statement, merge, timestamp, transitions
from rose_core.lending import Outcome, Plan, Policy
from rose_operator import metrics, routers
from rose_operator.admission import Unreadable
from rose_operator.api import FIELD_MANAGER, Kind
from rose_operator.errors import NOT_FOUND, ApiRefused, OperatorError
from rose_operator.lease_status import lease_status
from rose_operator.pool_status import pool_status
from rose_operator.settings import Settings
from rose_operator.slot_status import slot_status
from rose_operator.store import Raw, Store
from rose_operator.world import World

_log = logging.getLogger(__name__)

Thing = ServingPool | RolloutLease | RolloutSlot
Write = Callable[[], Awaitable[None]]

# Totals alone are written this often at most.
_TOTALS_SECONDS = 60.0
_NEGATIVE = frozenset({ConditionType.RECLAIMING, ConditionType.PAUSED})
_TOLD = (
    ConditionType.ACCEPTED,
    ConditionType.PAUSED,
    ConditionType.RECLAIMING,
    ConditionType.GRANTED,
    ConditionType.SERVING_PROTECTED,
    ConditionType.READY,
)


class StatusApi(Protocol):
    """What reporting needs of the API server."""

    async def apply_status(self, kind: Kind, manifest: Raw) -> Raw:
        """Write a status."""

    async def create(self, kind: Kind, manifest: Raw) -> Raw:
        """Create an Event."""


class Reporter:
    """Compares what should be said with what stands there."""

    def __init__(self, settings: Settings, stores: dict[Kind, Store], policy: Policy) -> None:
        self._settings = settings
        self._stores = stores
        self._policy = policy
        self._totals_at: dict[str, float] = {}

    def statuses(self, world: World, plan: Plan, api: StatusApi) -> Iterator[Write]:
        """One write for every status that differs; sets the metrics besides."""
        _publish(world, plan)
        for pool in world.pools.good.values():
            said = pool_status(pool, world, plan, self._policy)
            yield from self._compare(Kind.POOL, pool, said, world, api)
        for slot in world.slots.good.values():
            status = _slot(slot, world, self._policy)
            yield from self._compare(Kind.SLOT, slot, status, world, api)
        for key, lease in world.leases.good.items():
            outcome = plan.outcomes.get(key)
            if outcome is not None:
                yield from self._lease(lease, world, outcome, api)
        for kind, bad in (
            *((Kind.POOL, bad) for bad in world.pools.bad),
            *((Kind.LEASE, bad) for bad in world.leases.bad),
            *((Kind.SLOT, bad) for bad in world.slots.bad),
        ):
            yield from self._unreadable(kind, bad, world, api)

    def _lease(
        self, lease: RolloutLease, world: World, outcome: Outcome, api: StatusApi
    ) -> Iterator[Write]:
        name = routers.router_name(lease.metadata.namespace, lease.metadata.name)
        live = self._stores[Kind.DEPLOYMENT].get(f"{self._settings.namespace}/{name}")
        url = routers.router_url(name, self._settings.namespace) if live else ""
        status = lease_status(
            lease, world, outcome, router_url=url, router_ready=routers.is_ready(live)
        )
        _publish_lease(lease, status)
        only_totals = status.model_copy(update={"totals": lease.status.totals}) == lease.status
        recently = world.monotonic - self._totals_at.get(lease.metadata.uid, world.monotonic)
        if only_totals and recently < _TOTALS_SECONDS:
            self._totals_at.setdefault(lease.metadata.uid, world.monotonic)
            return
        self._totals_at[lease.metadata.uid] = world.monotonic
        yield from self._compare(Kind.LEASE, lease, status, world, api)

    def _compare(
        self, kind: Kind, thing: Thing, status: ApiModel, world: World, api: StatusApi
    ) -> Iterator[Write]:
        if status == thing.status:
            return

        async def write() -> None:
            manifest = _manifest(kind, thing.metadata.namespace, thing.metadata.name, status)
            try:
                self._stores[kind].put(await api.apply_status(kind, manifest))
            except ApiRefused as error:
                if error.code != NOT_FOUND:
                    raise
                # It was deleted and the watch has not said so (yet).
                self._stores[kind].forget(thing.metadata.key)
                return
            new: tuple[Condition, ...] = getattr(status, "conditions", ())
            told = [c for c in transitions(thing.status.conditions, new) if _is_news(c, thing)]
            if told:
                await _tell(kind, thing, min(told, key=_urgency), world, api)

        yield write

    def _unreadable(
        self, kind: Kind, bad: Unreadable, world: World, api: StatusApi
    ) -> Iterator[Write]:
        """An object that cannot be read still gets its answer."""
        metadata = bad.raw["metadata"]
        said = [
            Statement(ConditionType.READY, False, bad.refusal.reason, bad.refusal.message),
            Statement(ConditionType.ACCEPTED, False, bad.refusal.reason, bad.refusal.message),
        ]
        old = (bad.raw.get("status") or {}).get("conditions") or []
        before = tuple(Condition.model_validate(entry) for entry in old)
        generation = int(metadata.get("generation") or 0)
        conditions = merge(before, said, generation=generation, now=world.now)
        if tuple(c for c in before if c.type in {"Ready", "Accepted"}) == conditions:
            return
        status = {
            "observedGeneration": generation,
            "conditions": [condition.as_dict() for condition in conditions],
        }

        async def write() -> None:
            manifest = _plain_manifest(kind, metadata["namespace"], metadata["name"], status)
            self._stores[kind].put(await api.apply_status(kind, manifest))

        yield write


def _slot(slot: RolloutSlot, world: World, policy: Policy) -> SlotStatus:
    """The slot's status; what an agent said beyond every bound leaves it as it was."""
    try:
        return slot_status(slot, world, policy)
    except ValidationError as error:
        _log.error("report about slot %s: %s", slot.metadata.name, error)
        return slot.status


def _manifest(kind: Kind, namespace: str, name: str, status: ApiModel) -> Raw:
    return _plain_manifest(kind, namespace, name, status.as_dict())


def _plain_manifest(kind: Kind, namespace: str, name: str, status: dict[str, Any]) -> Raw:
    return {
        "apiVersion": API_VERSION,
        "kind": kind.value,
        "metadata": {"namespace": namespace, "name": name},
        "status": status,
    }


def _is_news(condition: Condition, thing: Thing) -> bool:
    """Whether people wait for it; that nothing is paused or reclaimed at first sight is none."""
    first = all(old.type != condition.type for old in thing.status.conditions)
    calm = condition.type in _NEGATIVE and condition.status == "False"
    return condition.type in _TOLD and not (first and calm)


def _urgency(condition: Condition) -> int:
    return _TOLD.index(ConditionType(condition.type))


async def _tell(
    kind: Kind, thing: Thing, condition: Condition, world: World, api: StatusApi
) -> None:
    """One Event; losing it harms nobody."""
    good = (condition.status == "True") != (condition.type in _NEGATIVE)
    when = timestamp(world.now)
    event: Raw = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{thing.metadata.name[:200]}.{uuid4().hex[:12]}",
            "namespace": thing.metadata.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": kind.value,
            "namespace": thing.metadata.namespace,
            "name": thing.metadata.name,
            "uid": thing.metadata.uid,
        },
        "reason": condition.reason,
        "message": f"{condition.type}={condition.status} {condition.message}".strip(),
        "type": "Normal" if good or condition.status == "Unknown" else "Warning",
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
    try:
        await api.create(Kind.EVENT, event)
    except OperatorError as error:
        _log.warning("Event %s not written: %s", condition.reason, error)


def _publish(world: World, plan: Plan) -> None:
    """The same words as in the conditions, as metrics."""
    metrics.REPLICAS.clear()
    metrics.SLOTS.clear()
    metrics.REFUSALS.clear()
    metrics.HARVESTED_TOKENS.clear()
    metrics.LENT_SECONDS.clear()
    counts: Counter[tuple[str, Reason]] = Counter()
    for node in world.telemetry.nodes.values():
        for report in node.request.replicas:
            found = plan.verdicts.get(report.pod_uid)
            if found is not None:
                counts[report.pool, found.reason] += 1
    for (pool, reason), count in counts.items():
        metrics.REPLICAS.labels(pool, reason).set(count)
    for key, refusal in world.refusals.items():
        metrics.REFUSALS.labels(key, refusal.reason).set(1)


def _publish_lease(lease: RolloutLease, status: LeaseStatus) -> None:
    key = lease.metadata.key
    metrics.SLOTS.labels(key, "wanted").set(status.slots_wanted)
    metrics.SLOTS.labels(key, "granted").set(status.slots_granted)
    metrics.SLOTS.labels(key, "ready").set(status.slots_ready)
    metrics.HARVESTED_TOKENS.labels(key).set(status.totals.harvested_tokens)
    metrics.LENT_SECONDS.labels(key).set(status.totals.lent_milliseconds / 1000)
