"""One reconcile pass: look, plan, write the differences.

Order of the writes: slots (``slot_writes``), routers (``router_writes``), statuses (``report``);
inside a step several at a time (``writer``). A refused write concerns its own object; an API server
that does not answer ends the pass, and the next one starts from what is there. Routers and statuses
step back, but not for long, when a request waits: the next pass lends first.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rose_core import lending
from rose_core.api import Reason, RolloutLease, RolloutSlot, ServingPool, TenantPolicy
from rose_core.wire.routing import DemandNote
from rose_operator.apply.router_writes import RouterNeeds, RouterWrites
from rose_operator.apply.slot_writes import SlotWrites
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.backoff import KeyedBackoff
from rose_operator.kube.object_cache import ObjectCache, key_of
from rose_operator.kube.writer import WriteApi, Writer
from rose_operator.metrics import PLAN_CPU_SECONDS, PLAN_SECONDS
from rose_operator.notices import Notices
from rose_operator.plan.admission import Offer
from rose_operator.plan.cluster_facts import ClusterFacts
from rose_operator.plan.cluster_state import ClusterState, observe_cluster, utc
from rose_operator.plan.load_history import LoadHistory
from rose_operator.plan.snapshot import Knowledge, Snapshots
from rose_operator.plan.telemetry import NodeTelemetry
from rose_operator.plan.toggle_costs import ToggleCosts
from rose_operator.plan.typed_objects import TypedReader
from rose_operator.settings import Settings
from rose_operator.status import events
from rose_operator.status.event_limits import EventLimiter
from rose_operator.status.pass_metrics import drop_node
from rose_operator.status.report import Reporter
from rose_operator.tenancy import tenancy_of

# Passes between two clean-ups of what is kept about objects.
_KEEP_EVERY = 20
# Questions that come all the time must not keep every status from being written.
_STATUSES_SECONDS = 3.0


@dataclass
class Reconciler:
    """Carries the plan out.

    Attributes:
        may_write: whether the leader lock is held, asked before every write.
        memory: the planner's; lost with the process, which only delays loans.
        remembered: pool key -> replicas it had when the operator started.
        hurry: whether a lease or pool has been asked for since the pass began.
        demand: the last report of a lease's router, by the lease's key.
        notes: the last note of each process of that router, for the lease's totals.
        worked_seconds: processor time of the last pass, without its writes.
    """

    settings: Settings
    api: WriteApi
    stores: dict[ObjectKind, ObjectCache]
    telemetry: NodeTelemetry
    may_write: Callable[[], bool]
    clock: Callable[[], float]
    wall: Callable[[], float]
    policy: lending.PlannerPolicy = field(default_factory=lending.PlannerPolicy)
    memory: lending.PlannerMemory = field(default_factory=lending.PlannerMemory)
    remembered: dict[str, int] = field(default_factory=dict)

    hurry: Callable[[], bool] = lambda: False
    worked_seconds: float = 0.0

    cluster_facts: ClusterFacts = field(default_factory=ClusterFacts)
    notices: Notices = field(default_factory=Notices)
    backoff: KeyedBackoff = field(default_factory=KeyedBackoff)
    demand: Callable[[str], lending.Demand | None] = lambda _: None
    notes: Callable[[str], Sequence[DemandNote]] = lambda _: ()

    def __post_init__(self) -> None:
        self._pools = TypedReader(ServingPool, self.stores[ObjectKind.POOL])
        self._leases = TypedReader(RolloutLease, self.stores[ObjectKind.LEASE])
        self._slots = TypedReader(RolloutSlot, self.stores[ObjectKind.SLOT])
        self._policies = (
            TypedReader(TenantPolicy, self.stores[ObjectKind.POLICY])
            if self.settings.tenancy
            else None
        )
        self._known = Knowledge(self.cluster_facts, LoadHistory(), ToggleCosts(), self.demand)
        self._snapshots = Snapshots(self._known)
        self._writer = Writer(
            self.api,
            self.stores,
            self.settings.namespace,
            may_write=self.may_write,
            clock=self.clock,
            backoff=self.backoff,
            routers=self.settings.routers,
            identity=self.settings.identity,
        )
        self._events = EventLimiter(self.api, self.clock)
        self._reporter = Reporter(
            self.settings,
            self.stores,
            self.policy,
            loads=self._known.loads,
            writer=self._writer,
            api=self.api,
            events=self._events,
        )
        self._slot_writes = SlotWrites(
            self._writer,
            self.telemetry,
            self.notices,
            namespace=self.settings.namespace,
            stale_seconds=self.policy.stale_seconds,
            lapse_seconds=max(self.policy.forget_seconds, 2 * self.settings.grant_seconds),
            clock=self.clock,
        )
        self._router_writes = RouterWrites(self._writer, self.stores, self.settings)
        self._passes = 0
        self._statuses_at = float("-inf")

    @property
    def waiting(self) -> bool:
        """Whether a status waits for its time, so that the next pass should not be far."""
        return self._reporter.waiting

    def remember_pools(self) -> None:
        """Keep the pools' sizes from before the start, while agents are still coming back."""
        for raw in self.stores[ObjectKind.POOL].all():
            status = raw.get("status") or {}
            key = f"{raw['metadata']['namespace']}/{raw['metadata']['name']}"
            self.remembered[key] = int(status.get("replicas") or 0)

    def agents_are_back(self) -> bool:
        """Whether nodes with slots and the pools' replicas from before the start are reported."""
        nodes = {raw["spec"]["members"][0]["node"] for raw in self.stores[ObjectKind.SLOT].all()}
        reported = Counter(
            report.pool
            for node in self.telemetry.nodes.values()
            for report in node.request.replicas
        )
        pools = self.remembered.items()
        complete = all(reported[pool] >= count for pool, count in pools)
        return complete and nodes <= self.telemetry.nodes.keys()

    async def run_pass(self) -> lending.LendingPlan:
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
        await run(list(self._slot_writes.writes(world, plan)))
        await self._emit_releases(world, plan)
        with self._working():
            wanted = list(self._router_writes.writes(self._needs(world, plan)))
        await run(wanted, self._is_hurried)
        with self._working():
            after = world if self._revisions() == seen else self._look()
            writes = list(self._reporter.statuses(after, plan, self._needs(after, plan)))
        if await run(writes, self._is_hurried):
            self._statuses_at = self.clock()
        self._clean_up()
        return plan

    def _is_hurried(self) -> bool:
        """Whether routers and statuses should leave the rest to the next pass."""
        return self.hurry() and self.clock() - self._statuses_at < _STATUSES_SECONDS

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count processor time; none of it may be spent in an ``await``."""
        since = time.thread_time()
        yield
        self.worked_seconds += time.thread_time() - since

    def _plan(self) -> tuple[ClusterState, lending.LendingPlan]:
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
        slots = world.slots.good.values()
        self._known.toggles.observe(slots, self.telemetry, now)
        self._known.sizes.observe(world.leases.good.values(), slots, self.telemetry)
        seen = self._snapshots.take(world, self.memory, self.policy, self.remembered)
        return world, lending.plan(seen, now)

    def _needs(self, world: ClusterState, plan: lending.LendingPlan) -> RouterNeeds:
        return RouterNeeds(world, plan, self.demand, self.stores, self.settings)

    def _look(self) -> ClusterState:
        leases = self._leases.read()
        return observe_cluster(
            self._pools.read(),
            leases,
            self._slots.read(),
            self.telemetry,
            cluster_facts=self.cluster_facts,
            offer=Offer(
                frozenset(self.settings.stores), self.settings.engine_classes, self.settings.runs
            ),
            tenancy=tenancy_of(self._policies, self.stores),
            now=utc(self.wall()),
            monotonic=self.clock(),
            notes={key: notes for key in leases.good if (notes := self.notes(key))},
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
        self._router_writes.keep(self._leases.read().good)

    async def _emit_releases(self, world: ClusterState, plan: lending.LendingPlan) -> None:
        """One Event per lease and reason."""
        lost: dict[tuple[str, Reason], list[lending.SlotRelease]] = defaultdict(list)
        owners = {slot.metadata.name: slot.spec.lease_ref for slot in world.slots.good.values()}
        for release in plan.releases:
            lost[owners[release.slot].key, release.reason].append(release)
        for (key, reason), releases in lost.items():
            lease = world.leases.good.get(key)
            if lease is not None and self.may_write():
                names = [release.slot for release in releases]
                event = events.release_event(lease, reason, names, releases[0].message, world.now)
                await self._events.emit(event)
