"""One reconcile pass: look, plan, write the differences.

Order of the writes: release, delete what is vacated, lend, routers, statuses. A refused write
concerns its own object only; an API server that does not answer ends the pass, and the next one
starts from what is there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import ValidationError

from rose_core import lending
from rose_core.api import Desired, Member, Reason, RolloutSlot
from rose_core.wire.sync import ReplicaReport
from rose_operator import routers, slots
from rose_operator.admission import Offer
from rose_operator.api import Kind
from rose_operator.errors import ApiRefused, NotLeader
from rose_operator.metrics import DECISIONS
from rose_operator.report import Reporter
from rose_operator.settings import Settings
from rose_operator.store import Raw, Store
from rose_operator.telemetry import Telemetry
from rose_operator.world import World, look, snapshot, utc

_log = logging.getLogger(__name__)


class WriteApi(Protocol):
    """What a pass needs of the API server."""

    async def apply(self, kind: Kind, manifest: Raw) -> Raw:
        """Create or change."""

    async def apply_status(self, kind: Kind, manifest: Raw) -> Raw:
        """Write a status."""

    async def delete(self, kind: Kind, name: str) -> None:
        """Delete from ROSE's namespace."""

    async def create(self, kind: Kind, manifest: Raw) -> Raw:
        """Create."""


@dataclass
class Reconciler:
    """Carries the plan out.

    Attributes:
        may_write: the leader lock's word, asked before every write.
        memory: the planner's; lost with the process, which only delays loans.
        remembered: pool key -> replicas it had when the operator started.
    """

    settings: Settings
    api: WriteApi
    stores: dict[Kind, Store]
    telemetry: Telemetry
    may_write: Callable[[], bool]
    clock: Callable[[], float]
    wall: Callable[[], float]
    policy: lending.Policy = field(default_factory=lending.Policy)
    memory: lending.Memory = field(default_factory=lending.Memory)
    remembered: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reporter = Reporter(self.settings, self.stores, self.policy)

    def remember_pools(self) -> None:
        """Keep the pools' sizes from before the start, while agents are still coming back."""
        for raw in self.stores[Kind.POOL].all():
            status = raw.get("status") or {}
            key = f"{raw['metadata']['namespace']}/{raw['metadata']['name']}"
            self.remembered[key] = int(status.get("replicas") or 0)

    def agents_are_back(self) -> bool:
        """Whether nodes with slots and the pools' replicas from before the start are reported."""
        nodes = {raw["spec"]["members"][0]["node"] for raw in self.stores[Kind.SLOT].all()}
        reported = Counter(
            report.pool
            for node in self.telemetry.nodes.values()
            for report in node.request.replicas
        )
        pools = self.remembered.items()
        complete = all(reported[pool] >= count for pool, count in pools)
        return complete and nodes <= self.telemetry.nodes.keys()

    async def run_pass(self) -> lending.Plan:
        """Look, plan, write.

        Raises:
            ApiUnavailable: the API server does not answer; the world is as far as it got.
            NotLeader: the lock was lost in between.
        """
        if self.clock() - self.telemetry.started > self.policy.forget_seconds:
            self.remembered.clear()
        self.telemetry.forget(self.clock(), self.policy.forget_seconds)
        world = self._look()
        plan = lending.plan(
            snapshot(world, self.memory, self.policy, self.remembered), world.now.timestamp()
        )
        self.memory = plan.memory
        await self._release(world, plan)
        await self._delete_vacated(world)
        await self._update(world)
        await self._lend(world, plan)
        await self._routers(world)
        for write in self._reporter.statuses(self._look(), plan, self.api):
            await self._guarded(write)
        return plan

    def _look(self) -> World:
        return look(
            self.stores[Kind.POOL].all(),
            self.stores[Kind.LEASE].all(),
            self.stores[Kind.SLOT].all(),
            self.telemetry,
            offer=Offer(frozenset(self.settings.stores), self.settings.engine_classes),
            now=utc(self.wall()),
            monotonic=self.clock(),
        )

    async def _release(self, world: World, plan: lending.Plan) -> None:
        by_name = {slot.metadata.name: slot for slot in world.slots.good.values()}
        for release in plan.releases:
            slot = by_name[release.slot]
            _log.info("release %s: %s (%s)", release.slot, release.reason, release.message)
            DECISIONS.labels("release", release.reason).inc()
            await self._apply(Kind.SLOT, slots.released(slot, release.reason))

    async def _delete_vacated(self, world: World) -> None:
        for slot in world.slots.good.values():
            if slot.spec.desired is Desired.RELEASED and self._vacated(slot):
                await self._delete(Kind.SLOT, slot.metadata.name)

    def _vacated(self, slot: RolloutSlot) -> bool:
        """Its node reports without it, or is silent for so long that its grant has lapsed."""
        node = slot.spec.member.node
        silence = self.telemetry.silence(node, self.clock())
        if silence > self.policy.stale_seconds or node not in self.telemetry.nodes:
            return silence > max(self.policy.forget_seconds, 2 * self.settings.grant_seconds)
        return self.telemetry.slot(slot.metadata.uid, node) is None

    async def _update(self, world: World) -> None:
        """Slots follow what their lease says about engine and weights."""
        for key, lease in world.leases.good.items():
            if key in world.refusals:
                continue
            for slot in world.slots_of(lease):
                manifest = slots.updated(slot, lease)
                if manifest is not None and slot.spec.desired is Desired.LENT:
                    await self._apply(Kind.SLOT, manifest)

    async def _lend(self, world: World, plan: lending.Plan) -> None:
        for lend in plan.lends:
            member = self._member(lend.replica)
            if member is None:
                continue
            _log.info("lend %s on %s to %s", member.pod_name, member.node, lend.lease)
            DECISIONS.labels("lend", Reason.QUALIFIES).inc()
            lease = world.leases.good[lend.lease]
            await self._apply(Kind.SLOT, slots.lent(lease, member, self.settings.namespace))

    def _member(self, pod_uid: str) -> Member | None:
        for name, node in self.telemetry.nodes.items():
            for report in node.request.replicas:
                if report.pod_uid == pod_uid:
                    return _read_member(name, report)
        return None

    async def _routers(self, world: World) -> None:
        """A router for every lease that was ever accepted and has not ended."""
        wanted: set[str] = set()
        for key, lease in world.leases.good.items():
            refusal = world.refusals.get(key)
            ended = refusal is not None and refusal.reason is Reason.LEASE_EXPIRED
            if ended or (refusal is not None and not lease.status.router_url):
                continue
            wanted.add(routers.router_name(lease.metadata.namespace, lease.metadata.name))
            for kind, manifest in (
                (Kind.DEPLOYMENT, routers.deployment(lease, self.settings)),
                (Kind.SERVICE, routers.service(lease, self.settings)),
            ):
                live = self.stores[kind].get(_key(manifest))
                if not routers.is_current(manifest, live):
                    await self._apply(kind, manifest)
        # A lease that cannot be read keeps its router: nobody knows what it wants.
        unreadable = {_router_of(bad.raw) for bad in world.leases.bad}
        for kind in (Kind.DEPLOYMENT, Kind.SERVICE):
            for raw in self.stores[kind].all():
                name = raw["metadata"]["name"]
                ours = routers.LEASE in (raw["metadata"].get("annotations") or {})
                if ours and name not in wanted | unreadable:
                    await self._delete(kind, name)

    async def _apply(self, kind: Kind, manifest: Raw) -> None:
        async def write() -> None:
            self.stores[kind].put(await self.api.apply(kind, manifest))

        await self._guarded(write)

    async def _delete(self, kind: Kind, name: str) -> None:
        async def write() -> None:
            await self.api.delete(kind, name)
            self.stores[kind].forget(f"{self.settings.namespace}/{name}")

        await self._guarded(write)

    async def _guarded(self, write: Callable[[], Awaitable[None]]) -> None:
        """One write, if we still lead; a refusal concerns this object only."""
        if not self.may_write():
            message = "the leader Lease was lost during a pass"
            raise NotLeader(message)
        try:
            await write()
        except ApiRefused as error:
            _log.error("write refused: %s", error)  # the message says it all


def _read_member(node: str, report: ReplicaReport) -> Member | None:
    """The replica as a slot's member; None when the agent's words fit no object."""
    try:
        return Member(
            node=node,
            pod_name=report.pod_name,
            pod_uid=report.pod_uid,
            gpu_uuids=report.gpu_uuids,
        )
    except ValidationError as error:
        _log.error("replica %s of node %s: %s", report.pod_name, node, error)
        return None


def _key(manifest: Raw) -> str:
    return f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"


def _router_of(raw: Raw) -> str:
    return routers.router_name(raw["metadata"]["namespace"], raw["metadata"]["name"])
