"""One reconcile pass: look, plan, write the differences.

Order of the writes: slots (released, lent, deleted when vacated, following their lease), routers,
statuses; inside a step several at a time (``writer``). A refused write concerns its own object;
an API server that does not answer ends the pass, and the next one starts from what is there.
Routers and statuses step back, but not for long, when somebody asks for something: the next pass
lends first.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from rose_core import lending
from rose_core.api import Desired, Member, Reason, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.rolloutslot import Tier
from rose_core.wire.sync import ReplicaReport
from rose_operator import events, routers, slots
from rose_operator.admission import Offer
from rose_operator.api import Kind
from rose_operator.backoff import Backoff
from rose_operator.kept import Kept
from rose_operator.loads import Loads
from rose_operator.metrics import DECISIONS, PLAN_CPU_SECONDS, PLAN_SECONDS
from rose_operator.notices import Notices
from rose_operator.publishing import drop_node
from rose_operator.reading import Reader
from rose_operator.report import Reporter
from rose_operator.settings import Settings
from rose_operator.snapshot import Knowledge, Snapshots
from rose_operator.store import Raw, Store, key_of
from rose_operator.surroundings import Surroundings
from rose_operator.telemetry import Telemetry
from rose_operator.toggles import Toggles
from rose_operator.world import World, look, utc
from rose_operator.writer import Write, WriteApi, Writer

_log = logging.getLogger(__name__)
# Passes between two clean-ups of what is kept about objects.
_KEEP_EVERY = 20
# Questions that come all the time must not keep every status from being written.
_STATUSES_SECONDS = 3.0


@dataclass
class Reconciler:
    """Carries the plan out.

    Attributes:
        may_write: the leader lock's word, asked before every write.
        memory: the planner's; lost with the process, which only delays loans.
        remembered: pool key -> replicas it had when the operator started.
        hurry: whether a lease or pool has been asked for since the pass began.
        worked_seconds: processor time of the last pass, without its writes.
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

    hurry: Callable[[], bool] = lambda: False
    worked_seconds: float = 0.0

    surroundings: Surroundings = field(default_factory=Surroundings)
    notices: Notices = field(default_factory=Notices)
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        self._pools = Reader(ServingPool, self.stores[Kind.POOL])
        self._leases = Reader(RolloutLease, self.stores[Kind.LEASE])
        self._slots = Reader(RolloutSlot, self.stores[Kind.SLOT])
        self._known = Knowledge(self.surroundings, Loads(), Toggles())
        self._snapshots = Snapshots(self._known)
        self._follow: Kept[Raw | None] = Kept()
        self._writer = Writer(
            self.api,
            self.stores,
            self.settings.namespace,
            may_write=self.may_write,
            clock=self.clock,
            backoff=self.backoff,
        )
        self._reporter = Reporter(
            self.settings,
            self.stores,
            self.policy,
            loads=self._known.loads,
            writer=self._writer,
            api=self.api,
        )
        self._manifests: dict[str, tuple[object, tuple[tuple[Kind, Raw], ...]]] = {}
        self._passes = 0
        self._told_at = float("-inf")

    @property
    def waiting(self) -> bool:
        """Whether a status waits for its time, so that the next pass should not be far."""
        return self._reporter.waiting

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
        for node in self.telemetry.forget(self.clock(), self.policy.forget_seconds):
            drop_node(node)
        self.worked_seconds = 0.0
        with PLAN_SECONDS.time(), self._working():
            world, plan = self._plan()
            seen = self._revisions()
        PLAN_CPU_SECONDS.observe(self.worked_seconds)
        self.memory = plan.memory
        run = self._writer.run
        # Each of these concerns another slot: a loan never waits for a release of its own pass.
        await run(
            [
                *self._release(world, plan),
                *self._lend(world, plan),
                *self._delete_vacated(world),
                *self._update(world),
            ]
        )
        await self._tell_releases(world, plan)
        with self._working():
            wanted = list(self._routers(world))
        await run(wanted, self._is_hurried)
        with self._working():
            after = world if self._revisions() == seen else self._look()
            told = list(self._reporter.statuses(after, plan))
        if await run(told, self._is_hurried):
            self._told_at = self.clock()
        self._clean_up()
        return plan

    def _is_hurried(self) -> bool:
        """Whether routers and statuses should leave the rest to the next pass."""
        return self.hurry() and self.clock() - self._told_at < _STATUSES_SECONDS

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count processor time; none of it may be spent in an ``await``."""
        since = time.thread_time()
        yield
        self.worked_seconds += time.thread_time() - since

    def _plan(self) -> tuple[World, lending.Plan]:
        world = self._look()
        now = world.now.timestamp()
        fresh = {
            pool: [
                report
                for node, report in reports
                if world.telemetry.silence(node, world.monotonic) <= self.policy.stale_seconds
            ]
            for pool, reports in world.reports.items()
        }
        self._known.loads.observe(world.pools.good, fresh, now)
        self._known.toggles.observe(world.slots.good.values(), self.telemetry, now)
        seen = self._snapshots.take(world, self.memory, self.policy, self.remembered)
        return world, lending.plan(seen, now)

    def _look(self) -> World:
        return look(
            self._pools.read(),
            self._leases.read(),
            self._slots.read(),
            self.telemetry,
            surroundings=self.surroundings,
            offer=Offer(
                frozenset(self.settings.stores), self.settings.engine_classes, self.settings.runs
            ),
            now=utc(self.wall()),
            monotonic=self.clock(),
        )

    def _revisions(self) -> tuple[int, ...]:
        return tuple(store.revision for store in self.stores.values())

    def _clean_up(self) -> None:
        self._passes += 1
        if self._passes % _KEEP_EVERY:
            return
        keys = {
            f"{kind.value} {key_of(raw)}" for kind in self.stores for raw in self.stores[kind].all()
        }
        self._reporter.keep(keys)
        self._writer.keep(keys)
        leases = self._leases.read().good
        self._manifests = {key: made for key, made in self._manifests.items() if key in leases}

    def _release(self, world: World, plan: lending.Plan) -> Iterator[Write]:
        by_name = {slot.metadata.name: slot for slot in world.slots.good.values()}
        for release in plan.releases:
            slot = by_name[release.slot]
            _log.info("release %s: %s (%s)", release.slot, release.reason, release.message)
            DECISIONS.labels("release", release.reason).inc()
            yield self._slot(slot.spec.member.node, slots.released(slot, release.reason))

    async def _tell_releases(self, world: World, plan: lending.Plan) -> None:
        """One Event per lease and reason."""
        lost: dict[tuple[str, Reason], list[lending.Release]] = defaultdict(list)
        owners = {slot.metadata.name: slot.spec.lease_ref for slot in world.slots.good.values()}
        for release in plan.releases:
            lost[owners[release.slot].key, release.reason].append(release)
        for (key, reason), releases in lost.items():
            lease = world.leases.good.get(key)
            if lease is not None and self.may_write():
                names = [release.slot for release in releases]
                event = events.of_releases(lease, reason, names, releases[0].message, world.now)
                await events.tell(event, self.api)

    def _delete_vacated(self, world: World) -> Iterator[Write]:
        for slot in world.slots.good.values():
            if slot.spec.desired is Desired.RELEASED and self._vacated(slot):
                yield self._writer.delete(Kind.SLOT, slot.metadata.name)

    def _vacated(self, slot: RolloutSlot) -> bool:
        """Its node reports without it, or is silent for so long that its grant has lapsed."""
        node = slot.spec.member.node
        silence = self.telemetry.silence(node, self.clock())
        if silence > self.policy.stale_seconds or node not in self.telemetry.nodes:
            return silence > max(self.policy.forget_seconds, 2 * self.settings.grant_seconds)
        return self.telemetry.slot(slot.metadata.uid, node) is None

    def _update(self, world: World) -> Iterator[Write]:
        """Slots follow their lease in engine and weights, and their pool in how GPUs are shared."""
        self._follow.turn()
        for key, lease in world.leases.good.items():
            if key in world.refusals:
                continue
            for slot in world.slots_of(lease):
                if slot.spec.desired is not Desired.LENT:
                    continue
                manifest = self._followed(slot, lease, world.pools.good.get(slot.spec.pool_ref.key))
                if manifest is not None:
                    yield self._slot(slot.spec.member.node, manifest)

    def _followed(
        self, slot: RolloutSlot, lease: RolloutLease, pool: ServingPool | None
    ) -> Raw | None:
        """What the slot should say after a change of lease or pool; None for nothing new."""
        versions = lease.metadata.resource_version, pool and pool.metadata.resource_version
        return self._follow.get(
            slot.metadata.key, slot, versions, lambda: slots.updated(slot, lease, pool)
        )

    def _lend(self, world: World, plan: lending.Plan) -> Iterator[Write]:
        found = {
            report.pod_uid: (node, report)
            for reports in world.reports.values()
            for node, report in reports
        }
        for lend in plan.lends:
            member = _read_member(*found[lend.replica])
            if member is None:
                continue
            _log.info("lend %s on %s to %s", member.pod_name, member.node, lend.lease)
            DECISIONS.labels("lend", Reason.QUALIFIES).inc()
            lease = world.leases.good[lend.lease]
            pool = world.pools.good[lease.spec.pool_ref.key]
            tier = Tier.WHOLE if lend.whole else Tier.SHARED
            manifest = slots.lent(lease, pool, member, self.settings.namespace, tier)
            yield self._slot(member.node, manifest)

    def _slot(self, node: str, manifest: Raw) -> Write:
        """A slot's spec, and word to its node that there is something to ask for."""
        write = self._writer.apply(Kind.SLOT, manifest)

        async def run() -> None:
            await write.run()
            self.notices.tell([node])

        return replace(write, run=run)

    def _routers(self, world: World) -> Iterator[Write]:
        """A router for every lease that was ever accepted and has not ended."""
        wanted: set[str] = set()
        for key, lease in world.leases.good.items():
            refusal = world.refusals.get(key)
            ended = refusal is not None and refusal.reason is Reason.LEASE_EXPIRED
            if ended or (refusal is not None and not lease.status.router_url):
                continue
            for kind, manifest in self._router(lease):
                wanted.add(manifest["metadata"]["name"])
                if not routers.is_current(manifest, self.stores[kind].get(key_of(manifest))):
                    yield self._writer.apply(kind, manifest)
        # A lease that cannot be read keeps its router: nobody knows what it wants.
        unreadable = {name for bad in world.leases.bad for name in _router_of(bad.raw)}
        for kind in (Kind.DEPLOYMENT, Kind.SERVICE):
            for raw in self.stores[kind].all():
                name = raw["metadata"]["name"]
                ours = routers.LEASE in (raw["metadata"].get("annotations") or {})
                if ours and name not in wanted | unreadable:
                    yield self._writer.delete(kind, name)

    def _router(self, lease: RolloutLease) -> tuple[tuple[Kind, Raw], ...]:
        """The manifests of a lease's router, made once per generation of the lease."""
        key, made_for = lease.metadata.key, (lease.metadata.uid, lease.metadata.generation)
        kept = self._manifests.get(key)
        if kept is None or kept[0] != made_for:
            made: tuple[tuple[Kind, Raw], ...] = (
                (Kind.DEPLOYMENT, routers.deployment(lease, self.settings)),
                (Kind.SERVICE, routers.service(lease, self.settings)),
            )
            if lease.spec.router.replicas > 1:
                made += ((Kind.SERVICE, routers.replicas_service(lease, self.settings)),)
            kept = self._manifests[key] = (made_for, made)
        return kept[1]


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


def _router_of(raw: Raw) -> tuple[str, str]:
    name = routers.router_name(raw["metadata"]["namespace"], raw["metadata"]["name"])
    return name, routers.replicas_name(name)
