"""Statuses of a pass: which objects should say something else than they do, and when to write it.

| difference | written after |
|---|---|
| a condition's status, an engine that runs or failed, a first status, a question | 0 s |
| a new generation was taken in | 1 s |
| reasons, counts, states on the way to somewhere | 5 s |
| messages alone | 120 s |
| totals alone | 60 s, and over all leases one per second, over all pools too |

What waits is joined by what follows, so a slot's life costs few writes (``StatusDeferral``).
Objects whose inputs are those of the last pass are not even compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from pydantic import ValidationError

from rose_core.api import (
    Condition,
    ConditionType,
    Desired,
    LeaseStatus,
    PoolStatus,
    RolloutLease,
    RolloutSlot,
    ServingPool,
    SlotStatus,
)
from rose_core.api.common import API_VERSION
from rose_core.api.conditions import Statement, merge, transitions
from rose_core.api.servingpool import revenue_of
from rose_core.lending import LeaseDecision, LendingPlan, PlannerPolicy
from rose_core.lending.routers import RouterDecision
from rose_core.wire.sync import SlotState
from rose_operator.apply import routers
from rose_operator.apply.router_writes import RouterNeeds, live_router
from rose_operator.errors import NOT_FOUND, ApiRefused
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import ObjectCache, Raw, key_of
from rose_operator.kube.writer import Write, WriteApi, Writer
from rose_operator.plan.admission import Unreadable
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.plan.load_history import LoadHistory
from rose_operator.settings import Settings
from rose_operator.status.event_limits import EventLimiter
from rose_operator.status.events import (
    ApiResource,
    condition_event,
    condition_to_report,
    unreadable_event,
)
from rose_operator.status.explain_requests import answer, is_asked, lease_summary, pool_summary
from rose_operator.status.lease_status import lease_status
from rose_operator.status.pass_metrics import PassMetrics
from rose_operator.status.pool_status import lent_replicas, pool_status
from rose_operator.status.slot_status import (
    slot_label,
    slot_report,
    slot_state,
    slot_status,
    slot_trouble,
)

_log = logging.getLogger(__name__)

_GENERATION_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_MESSAGE_SECONDS = 120.0
_TOTALS_SECONDS = 60.0
_SECONDS_PER_WRITE = 1.0
# Metrics are scraped seldom, and totals are due seldom: passes in between look at changes alone.
_FULL_SECONDS = 5.0
_ARRIVED = frozenset({SlotState.RUNNING, SlotState.FAILED, SlotState.STOPPED})
Status = PoolStatus | LeaseStatus | SlotStatus


class StatusDeferral:
    """Since when each object's status differs from what it should be.

    What may wait is written together with what changes meanwhile: within a few seconds most counts,
    messages and passing states change again.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def due(self, key: str, patience_seconds: float, now: float) -> bool:
        """Whether a difference that may wait for ``patience_seconds`` is written now."""
        return now - self._since.setdefault(key, now) >= patience_seconds

    def settle(self, key: str) -> None:
        """Stop waiting: the object's status is as it should be, or has just been written."""
        self._since.pop(key, None)

    def is_waiting(self, key: str) -> bool:
        """Whether a difference of this object waits for its time."""
        return key in self._since

    @property
    def waiting(self) -> bool:
        """Whether any difference waits."""
        return bool(self._since)

    def keep(self, keys: set[str]) -> None:
        """Forget objects that are gone."""
        self._since = {key: since for key, since in self._since.items() if key in keys}


class Reporter:
    """Compares each status with what it should be, and writes the difference when it is due."""

    def __init__(
        self,
        settings: Settings,
        stores: dict[ObjectKind, ObjectCache],
        policy: PlannerPolicy,
        *,
        loads: LoadHistory,
        writer: Writer,
        api: WriteApi,
        events: EventLimiter,
    ) -> None:
        self._settings = settings
        self._stores = stores
        self._policy = policy
        self._loads = loads
        self._writer = writer
        self._api = api
        self._events = events
        self._totals_at: dict[str, float] = {}
        self._deferral = StatusDeferral()
        self._publisher = PassMetrics()
        self._same: dict[str, object] = {}
        self._reported: dict[str, int] = {}
        self._full_at = float("-inf")

    @property
    def waiting(self) -> bool:
        """Whether a difference waits for its time."""
        return self._deferral.waiting

    def keep(self, keys: set[str]) -> None:
        """Forget objects that are gone."""
        self._deferral.keep(keys)
        self._same = {key: same for key, same in self._same.items() if key in keys}
        self._reported = {key: done for key, done in self._reported.items() if key in keys}
        self._totals_at = {key: at for key, at in self._totals_at.items() if key in keys}
        self._events.keep(keys)

    def statuses(
        self, world: ClusterState, plan: LendingPlan, needs: RouterNeeds
    ) -> Iterator[Write]:
        """One write for every status that is due; sets the metrics besides."""
        full = world.monotonic - self._full_at >= _FULL_SECONDS
        if full:
            self._full_at = world.monotonic
            self._publisher.begin(world, plan, self._loads)
        for pool in world.pools.good.values():
            yield from self._pool(pool, world, plan, publish=full)
        for slot in world.slots.good.values():
            yield from self._slot(slot, world)
        for key, lease in world.leases.good.items():
            outcome = plan.outcomes.get(key)
            if outcome is None:
                continue
            router = needs.decision(lease)
            if full or not self._is_same(lease, world, outcome, router):
                yield from self._lease(lease, world, outcome, router, publish=full)
        if full:
            self._publisher.end()
        yield from self._all_unreadable(world)

    def _all_unreadable(self, world: ClusterState) -> Iterator[Write]:
        for kind, found in (
            (ObjectKind.POOL, world.pools.bad),
            (ObjectKind.LEASE, world.leases.bad),
            (ObjectKind.SLOT, world.slots.bad),
        ):
            for bad in found:
                yield from self._unreadable(kind, bad, world)

    def _pool(
        self, pool: ServingPool, world: ClusterState, plan: LendingPlan, *, publish: bool
    ) -> Iterator[Write]:
        key = pool.metadata.key
        summary = pool_summary(pool, lent_replicas(pool, world), world.pool_refusals.get(key))
        status = pool_status(
            pool,
            world,
            plan,
            self._policy,
            load=self._loads.shape(pool, world.now.timestamp()),
            explanation=answer(
                pool, summary, plan.members.get(key, ()), world.now, world.reports_of(key)
            ),
        )
        if publish:
            self._publisher.publish_pool(pool, status)
        yield from self._compare_totals(ObjectKind.POOL, pool, status, world, len(world.pools.good))

    def _compare_totals(
        self,
        kind: ObjectKind,
        resource: ServingPool | RolloutLease,
        status: PoolStatus | LeaseStatus,
        world: ClusterState,
        count: int,
    ) -> Iterator[Write]:
        """Compare, but let totals that alone are new wait; ``count``: objects of the kind."""
        only_totals = (
            status.model_copy(update={"totals": resource.status.totals}) == resource.status
        )
        key, now = f"{kind.value} {resource.metadata.key}", world.monotonic
        period = max(_TOTALS_SECONDS, _SECONDS_PER_WRITE * count)
        if only_totals and now - self._totals_at.setdefault(key, now) < period:
            self._deferral.settle(key)
            return
        yield from self._compare(kind, resource, status, world, urgent=only_totals)

    def _slot(self, slot: RolloutSlot, world: ClusterState) -> Iterator[Write]:
        key = f"{ObjectKind.SLOT.value} {slot.metadata.key}"
        inputs = self._slot_inputs(slot, world)
        if self._same.get(key) == inputs:
            return
        try:
            status = slot_status(slot, world, self._policy)
        except ValidationError as error:
            # A report beyond every bound leaves the status as it was.
            _log.warning("report about slot %s: %s", slot.metadata.name, error)
            return
        if status == slot.status:
            self._same[key] = inputs
        yield from self._compare(ObjectKind.SLOT, slot, status, world)

    def _slot_inputs(self, slot: RolloutSlot, world: ClusterState) -> object:
        """Everything a slot's status depends on."""
        report = slot_report(slot, world)
        silence = world.telemetry.silence(slot.spec.member.node, world.monotonic)
        reported = report and (
            report.version,
            report.digest,
            report.endpoint,
            report.reason,
            report.message,
        )
        silent = silence > self._policy.stale_seconds
        return slot.metadata.resource_version, slot_state(slot, world), silent, reported

    def _is_same(
        self,
        lease: RolloutLease,
        world: ClusterState,
        outcome: LeaseDecision,
        wanted: RouterDecision,
    ) -> bool:
        """Whether all that a lease's status depends on, its totals apart, is as it was."""
        key = f"{ObjectKind.LEASE.value} {lease.metadata.key}"
        slots = tuple(
            (
                slot.metadata.resource_version,
                slot_state(slot, world),
                slot_label(slot, world),
                slot_trouble(slot, world),
            )
            for slot in world.slots_of(lease)
        )
        counts = (outcome.wanted, outcome.granted, outcome.reason, outcome.message)
        router = live_router(lease, self._stores, self._settings)
        route = self._route_of(routers.router_name(lease.metadata.namespace, lease.metadata.name))
        routed = route is not None and routers.is_routed(route)
        ready = routers.is_ready(router)
        inputs = lease.metadata.resource_version, slots, counts, wanted, ready, routed
        same = self._same.get(key) == inputs and not self._deferral.is_waiting(key)
        self._same[key] = inputs
        return same

    def _route_of(self, name: str) -> Raw | None:
        routes = self._stores.get(ObjectKind.ROUTE)
        return routes.get(f"{self._settings.routers}/{name}") if routes is not None else None

    def _lease(
        self,
        lease: RolloutLease,
        world: ClusterState,
        outcome: LeaseDecision,
        router: RouterDecision,
        *,
        publish: bool,
    ) -> Iterator[Write]:
        name = routers.router_name(lease.metadata.namespace, lease.metadata.name)
        live = live_router(lease, self._stores, self._settings)
        url = routers.url_of(name, self._settings, self._route_of(name)) if live else ""
        summary = lease_summary(lease, outcome, world.refusals.get(lease.metadata.key))
        status = lease_status(
            lease,
            world,
            outcome,
            router_url=url,
            router=router,
            selector=",".join(f"{k}={v}" for k, v in routers.labels_of(name).items()),
            router_ready=routers.is_ready(live),
            explanation=answer(
                lease,
                summary,
                outcome.verdicts,
                world.now,
                (one for pool in lease.spec.pools for one in world.reports_of(pool.key)),
            ),
        )
        if publish:
            earned = revenue_of(world.pools.good.get(pool.key) for pool in lease.spec.pools)
            self._publisher.publish_lease(lease, status, earned)
        yield from self._compare_totals(
            ObjectKind.LEASE, lease, status, world, len(world.leases.good)
        )

    def _compare(
        self,
        kind: ObjectKind,
        resource: ApiResource,
        status: Status,
        world: ClusterState,
        *,
        urgent: bool = False,
    ) -> Iterator[Write]:
        key = f"{kind.value} {resource.metadata.key}"
        if status == resource.status:
            self._deferral.settle(key)
            return
        patience = 0.0 if urgent else _patience(resource, status)
        if not self._deferral.due(key, patience, world.monotonic):
            return
        manifest = _manifest(
            kind, resource.metadata.namespace, resource.metadata.name, status.as_dict()
        )

        async def run() -> None:
            try:
                self._stores[kind].put(await self._api.apply_status(kind, manifest))
            except ApiRefused as error:
                if error.code != NOT_FOUND:
                    raise
                # It was deleted, and the watch has not delivered that yet.
                self._stores[kind].forget(resource.metadata.key)
                return
            self._deferral.settle(key)
            self._totals_at[key] = world.monotonic
            condition = condition_to_report(
                transitions(resource.status.conditions, status.conditions), resource
            )
            if condition is not None:
                await self._events.emit(condition_event(kind, resource, condition, world.now))

        yield self._writer.status(kind, manifest, run)

    def _unreadable(
        self, kind: ObjectKind, bad: Unreadable, world: ClusterState
    ) -> Iterator[Write]:
        """An object that cannot be read gets its answer; by an Event where no status is taken."""
        metadata = bad.raw["metadata"]
        statements = [
            Statement(ConditionType.READY, False, bad.refusal.reason, bad.refusal.message),
            Statement(ConditionType.ACCEPTED, False, bad.refusal.reason, bad.refusal.message),
        ]
        before = _old_conditions(bad.raw)
        generation = int(metadata.get("generation") or 0)
        conditions = merge(before, statements, generation=generation, now=world.now)
        if tuple(c for c in before if c.type in {"Ready", "Accepted"}) == conditions:
            return
        status = {
            "observedGeneration": generation,
            "conditions": [condition.as_dict() for condition in conditions],
        }
        manifest = _manifest(kind, metadata["namespace"], metadata["name"], status)

        async def run() -> None:
            try:
                self._stores[kind].put(await self._api.apply_status(kind, manifest))
            except ApiRefused:
                # The API server takes no status for a spec that its schema no longer allows.
                await self._report_unreadable(kind, bad, world)
                raise

        yield self._writer.status(kind, manifest, run)

    async def _report_unreadable(
        self, kind: ObjectKind, bad: Unreadable, world: ClusterState
    ) -> None:
        """Once per generation of the object and life of this process."""
        key = f"{kind.value} {key_of(bad.raw)}"
        generation = int(bad.raw["metadata"].get("generation") or 0)
        event = unreadable_event(kind, bad.raw, bad.refusal, world.now)
        if self._reported.get(key) != generation and await self._events.emit(event):
            self._reported[key] = generation


def _patience(resource: ApiResource, status: Status) -> float:
    """How long a difference may wait for others; the module's table."""
    changed = transitions(resource.status.conditions, status.conditions)
    old = {one.type: one.status for one in resource.status.conditions}
    if isinstance(resource, RolloutSlot):
        arrived = isinstance(status, SlotStatus) and status.state in _ARRIVED
        lent = resource.spec.desired is Desired.LENT
        return 0.0 if arrived and lent and changed else _JOIN_SECONDS
    if not old or is_asked(resource):
        return 0.0
    turned = any(
        old.get(one.type) != one.status and one.type != ConditionType.RECLAIMING for one in changed
    )
    if turned:
        return 0.0
    if status.observed_generation != resource.status.observed_generation:
        return _GENERATION_SECONDS
    late: dict[str, object] = {"conditions": resource.status.conditions}
    if isinstance(status, PoolStatus) and isinstance(resource.status, PoolStatus):
        # The first follows every loan by a pass; on its own it would double the writes of pools.
        late |= {"unwanted_gpus": resource.status.unwanted_gpus, "totals": resource.status.totals}
    figures = status.model_copy(update=late) != resource.status
    return _JOIN_SECONDS if changed or figures else _MESSAGE_SECONDS


def _old_conditions(raw: Raw) -> tuple[Condition, ...]:
    """The conditions of an object that cannot be read; none if they cannot either."""
    try:
        old = (raw.get("status") or {}).get("conditions") or []
        return tuple(Condition.model_validate(entry) for entry in old)
    except (AttributeError, TypeError, ValidationError) as error:
        _log.warning("conditions of %s: %s", key_of(raw), error)
        return ()


def _manifest(kind: ObjectKind, namespace: str, name: str, status: dict[str, object]) -> Raw:
    return {
        "apiVersion": API_VERSION,
        "kind": kind.value,
        "metadata": {"namespace": namespace, "name": name},
        "status": status,
    }
