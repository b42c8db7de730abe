"""The cluster as the planner wants it: ``snapshot(world, ...)``, pure.

``Snapshots`` gives the same, pass after pass, at the cost of what has changed (``memo``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rose_core import lending
from rose_core.api import Desired, Reason, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.poollending import Day, TimeWindow, WhenOpen
from rose_core.api.reasons import replica_refusal
from rose_core.api.rolloutslot import SlotEngine, SlotSharing, Tier
from rose_core.api.wholereplica import WholeReplica
from rose_core.devices.capabilities import Capability
from rose_core.devices.ownership import Proof
from rose_core.host_reasons import HostReason
from rose_core.identity import LeaseUid, SlotUid
from rose_core.lending import tenancy
from rose_core.lending.groups import ReportedGroup, unit
from rose_core.wire.sync import MOST_MODELS, NodeModel, ReplicaReport, SlotState
from rose_operator.plan import capabilities
from rose_operator.plan.admission import created, expiry, lending_pools
from rose_operator.plan.cluster_facts import ClusterFacts
from rose_operator.plan.cluster_state import ClusterState, labels_of
from rose_operator.plan.load_history import LoadHistory
from rose_operator.plan.memo import Memo
from rose_operator.plan.protection import misses_objective
from rose_operator.plan.slot_terms import engine_of, sharing_of
from rose_operator.plan.telemetry import NodeReport, NodeTelemetry, lendable
from rose_operator.plan.toggle_costs import ToggleCosts

_DAYS = list(Day)
_PERMILLE_PER_PERCENT = 10
_NOTHING: frozenset[str] = frozenset()
# Refusals by the leader of a group that are about its serving, not about its own GPU.
_OF_ALL_PODS = frozenset(
    {
        Reason.SERVING_RESTARTED,
        Reason.REPLICA_NOT_READY,
        Reason.STOP_REQUESTED,
        Reason.BREAKER_OPEN,
        Reason.SIGNAL_MISSING,
        Reason.SIGNAL_NOT_VERIFIED,
        Reason.TELEMETRY_STALE,
        Reason.MULTI_NODE_REPLICA,
    }
)

_UNKNOWN_NEEDS = lending.EngineNeeds()


@dataclass
class _Sized:
    """Of one lease in one pool: the terms, and bytes by node."""

    engine: SlotEngine
    sharing: SlotSharing
    nodes: dict[str, int] = field(default_factory=dict)


class EngineSizes:
    """What leases' engines need of a GPU, as the engine hosts that were to start them reported it.

    Kept by lease, pool and node, with the terms that it holds for. Once a lease asks for another
    model or cache, or a pool shares in another way, the size is unknown again. It is lost with the
    process, and learnt anew from the next report of a slot, or at the cost of one slot that does
    not start.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, _Sized]] = {}
        self._lacking: set[str] = set()

    def observe(
        self,
        leases: Iterable[RolloutLease],
        slots: Iterable[RolloutSlot],
        telemetry: NodeTelemetry,
    ) -> None:
        """Look at every slot's report; of leases that are gone nothing is kept."""
        present = {lease.metadata.uid for lease in leases}
        self._known = {uid: known for uid, known in self._known.items() if uid in present}
        self._lacking = set()
        for slot in slots:
            report = telemetry.slot(slot.metadata.uid, slot.spec.member.node)
            if report is None or report.slot.generation != slot.metadata.generation:
                continue
            failed = report.state in {SlotState.FAILED, SlotState.STARTING}
            if failed and report.reason == HostReason.INSUFFICIENT_MEMORY:
                self._lacking.add(slot.metadata.uid)
            if report.needs_bytes is not None and slot.spec.lease_ref.uid in present:
                self._learn(slot, report.needs_bytes)

    def _learn(self, slot: RolloutSlot, needed: int) -> None:
        spec = slot.spec
        pools = self._known.setdefault(spec.lease_ref.uid, {})
        sized = pools.get(spec.pool_ref.key)
        if sized is None or (sized.engine, sized.sharing) != (spec.engine, spec.sharing):
            sized = pools[spec.pool_ref.key] = _Sized(spec.engine, spec.sharing)
        sized.nodes[spec.member.node] = needed

    def needs(self, lease: RolloutLease, pools: Mapping[str, ServingPool]) -> lending.EngineNeeds:
        """What is known of the lease's engine as it is asked for now.

        Args:
            lease: as the API server has it.
            pools: by key; of others nothing is known.
        """
        known = self._known.get(lease.metadata.uid)
        if known is None:
            return _UNKNOWN_NEEDS
        engine = engine_of(lease)
        return lending.EngineNeeds(
            {
                (key, node): needed
                for key, sized in known.items()
                if key in pools
                and (sized.engine, sized.sharing) == (engine, sharing_of(pools[key]))
                for node, needed in sized.nodes.items()
            }
        )

    def lacks_memory(self, slot_uid: str) -> bool:
        """Whether the slot's node has found too little memory to start its engine."""
        return slot_uid in self._lacking


@dataclass(frozen=True)
class Knowledge:
    """What the operator has gathered besides objects and telemetry."""

    cluster_facts: ClusterFacts
    loads: LoadHistory
    toggles: ToggleCosts
    demand: Callable[[str], lending.Demand | None] = lambda _: None
    sizes: EngineSizes = field(default_factory=EngineSizes)


def snapshot(
    world: ClusterState,
    memory: lending.PlannerMemory,
    policy: lending.PlannerPolicy,
    remembered_replicas: Mapping[str, int],
    knowledge: Knowledge,
) -> lending.Snapshot:
    """The world as the planner wants it, made from nothing."""
    return Snapshots(knowledge).take(world, memory, policy, remembered_replicas)


class Snapshots:
    """One snapshot per pass; what has not changed since the last one is taken over from it."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._known = knowledge
        self._pools: Memo[lending.PoolTerms] = Memo()
        self._leases: Memo[lending.Lease] = Memo()
        self._slots: Memo[lending.Slot] = Memo()
        self._nodes: Memo[tuple[lending.Replica, ...]] = Memo()
        self._wanted: dict[str, tuple[Capability, ...]] = {}

    @property
    def computed_count(self) -> int:
        """How many things were translated, over all passes."""
        return sum(
            one.computed_count for one in (self._pools, self._leases, self._slots, self._nodes)
        )

    def take(
        self,
        world: ClusterState,
        memory: lending.PlannerMemory,
        policy: lending.PlannerPolicy,
        remembered_replicas: Mapping[str, int],
    ) -> lending.Snapshot:
        """The world as the planner wants it."""
        for kept in (self._pools, self._leases, self._slots, self._nodes):
            kept.begin_pass()
        silence = {
            node: world.telemetry.silence(node, world.monotonic)
            for node in {*world.telemetry.nodes, *_nodes_of_slots(world)}
        }
        reporting = frozenset(
            node
            for node, seconds in silence.items()
            if seconds <= policy.stale_seconds and node in world.telemetry.nodes
        )
        return lending.Snapshot(
            pools=tuple(
                self._pool(pool, world, remembered_replicas.get(key, 0))
                for key, pool in world.pools.good.items()
            ),
            replicas=self._replicas(world, reporting),
            leases=tuple(
                self._lease(key, lease, world) for key, lease in world.leases.good.items()
            ),
            slots=tuple(self._slot(slot) for slot in world.slots.good.values()),
            silence=silence,
            reporting=reporting,
            memory=memory,
            policy=policy,
        )

    def _pool(self, pool: ServingPool, world: ClusterState, remembered: int) -> lending.PoolTerms:
        key, now = pool.metadata.key, world.now.timestamp()
        outlook = self._known.loads.outlook(key, pool.spec.lending.forecast, now)
        breaker = _breaker(pool, world)
        return self._pools.get(
            key,
            pool,
            (remembered, outlook, breaker),
            lambda: replace(_pool(pool, remembered), outlook=outlook, breaker=breaker),
        )

    def _lease(self, key: str, lease: RolloutLease, world: ClusterState) -> lending.Lease:
        refusal = world.refusals.get(key)
        reason = None if refusal is None else refusal.reason
        toggle = self._known.toggles.seconds(lease.metadata.uid)
        labels = labels_of(lease, world.tenancy)
        pools = lending_pools(lease, world.pools.good, world.pool_refusals, labels)
        takes = tenancy.preempts(lease, world.tenancy)
        needs = self._known.sizes.needs(lease, world.pools.good)
        made = self._leases.get(
            key,
            lease,
            (reason, toggle, pools, takes, needs),
            lambda: replace(lease_of(lease, reason, toggle, pools, preempts=takes), needs=needs),
        )
        asked = self._known.demand(key)  # its ages move all the time
        return made if asked is None else replace(made, demand=asked)

    def _slot(self, slot: RolloutSlot) -> lending.Slot:
        running = self._known.toggles.has_run(slot.metadata.uid)
        lacks = self._known.sizes.lacks_memory(slot.metadata.uid)
        return self._slots.get(
            slot.metadata.key, slot, (running, lacks), lambda: _slot(slot, running, lacks)
        )

    def _replicas(
        self, world: ClusterState, reporting: frozenset[str]
    ) -> tuple[lending.Replica, ...]:
        """Every replica once; one that two living nodes claim is refused."""
        found: dict[str, lending.Replica] = {}
        pods = {slot.metadata.uid: slot.spec.member.pod_uid for slot in world.slots.good.values()}
        wanted = {key: capabilities.needs(pool) for key, pool in world.pools.good.items()}
        if wanted != self._wanted:
            self._wanted = wanted  # the same object otherwise: a comparison per node is dear
        facts = self._known.cluster_facts
        for name in sorted(world.telemetry.nodes):
            node = world.telemetry.nodes[name]
            place = _NodeFacts(
                facts.zones.get(name, ""),
                name in facts.cordoned,
                name not in reporting,
                _occupied(node, pods),
            )
            for replica in self._on_node(name, node, place):
                other = found.get(replica.uid)
                found[replica.uid] = replica if other is None else _spanning(other, replica, world)
        for group in world.telemetry.groups.values():
            _gather(found, group)
        return tuple(found.values())

    def _on_node(
        self, name: str, node: NodeReport, place: _NodeFacts
    ) -> tuple[lending.Replica, ...]:
        def make() -> tuple[lending.Replica, ...]:
            pairs = zip(node.request.replicas, node.used, strict=True)
            return tuple(
                _replica(node, place, report, self._wanted.get(report.pool), used)
                for report, used in pairs
            )

        return self._nodes.get(name, node.essence, (place, self._wanted, node.used), make)


def _nodes_of_slots(world: ClusterState) -> set[str]:
    return {slot.spec.member.node for slot in world.slots.good.values()}


def _pool(pool: ServingPool, remembered: int) -> lending.PoolTerms:
    limits = pool.spec.lending
    return lending.PoolTerms(
        key=pool.metadata.key,
        max_replicas_percent=limits.max_replicas_percent,
        min_unlent_replicas=limits.min_unlent_replicas,
        allowed_signals=frozenset(pool.spec.allowed_signals),
        windows=tuple(_window(window) for window in limits.time_windows),
        remembered_replicas=remembered,
        per_node=limits.max_replicas_per_node,
        per_zone_percent=limits.max_replicas_per_zone_percent,
        per_lease_percent=limits.max_replicas_per_lease_percent,
        per_minute=limits.max_loans_per_minute,
        spread=limits.spread,
        whole=_whole(pool.spec.whole_replica),
    )


def _whole(spec: WholeReplica | None) -> lending.WholeTerms | None:
    if spec is None:
        return None
    return lending.WholeTerms(
        spec.max_replicas, spec.min_awake_replicas, spec.max_busy_percent * _PERMILLE_PER_PERCENT
    )


def _breaker(pool: ServingPool, world: ClusterState) -> lending.BreakerTerms:
    breaker = pool.spec.lending.breaker
    return lending.BreakerTerms(
        missed=misses_objective(pool, world.reports_of(pool.metadata.key), world.telemetry),
        cooldown_seconds=breaker.cooldown_seconds,
        returns=breaker.when_open is WhenOpen.RETURN,
    )


def _window(window: TimeWindow) -> lending.DailyWindow:
    return lending.DailyWindow(
        days=frozenset(_DAYS.index(day) for day in window.days),
        start_minute=_minute(window.start_time),
        end_minute=_minute(window.end_time),
    )


def _minute(clock: str) -> int:
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)


def lease_of(
    lease: RolloutLease,
    refusal: Reason | None,
    toggle: float | None,
    pools: tuple[str, ...],
    *,
    preempts: bool,
) -> lending.Lease:
    """The lease as the planner wants it.

    Args:
        lease: as the API server has it.
        refusal: admission's reason.
        toggle: seconds that its loans have cost until they ran, None before the first.
        pools: that it borrows from, by key.
        preempts: its minimum may take slots of weaker leases.
    """
    end = expiry(lease)
    return lending.Lease(
        key=lease.metadata.key,
        uid=LeaseUid(lease.metadata.uid),
        pool=pools[0] if pools else lease.spec.pool_ref.key,
        priority=lease.spec.priority,
        created=created(lease).timestamp(),
        min_slots=lease.spec.slots.min,
        max_slots=lease.spec.slots.max,
        refusal=refusal,
        weight=lease.spec.weight,
        preempts=preempts,
        ends_at=end.timestamp() if end else None,
        toggle_seconds=toggle,
        suspended=lease.spec.suspend,
        more_pools=pools[1:],
        device_classes=frozenset(lease.spec.device_classes),
        model=lease.spec.model.name,
        gpus_per_slot=lease.spec.gpus_per_slot,
        turns_per_slot=lease.spec.max_trajectories_per_slot,
        idle_seconds=float(lease.spec.slots.idle_seconds),
    )


def _slot(slot: RolloutSlot, running: bool, lacks_memory: bool) -> lending.Slot:
    member = slot.spec.member
    return lending.Slot(
        name=slot.metadata.name,
        uid=SlotUid(slot.metadata.uid),
        lease=slot.spec.lease_ref.key,
        lease_uid=slot.spec.lease_ref.uid,
        pool=slot.spec.pool_ref.key,
        node=member.node,
        replica=member.pod_uid,
        gpus=member.gpu_uuids,
        created=created(slot).timestamp(),
        released=slot.spec.desired is Desired.RELEASED,
        running=running,
        whole=slot.spec.tier is Tier.WHOLE,
        lacks_memory=lacks_memory,
    )


class _NodeFacts(NamedTuple):
    """What all replicas of a node share; ``occupied`` as ``_occupied`` says."""

    zone: str
    cordoned: bool
    stale: bool
    occupied: frozenset[str] | None


def _occupied(node: NodeReport, pods: Mapping[str, str]) -> frozenset[str] | None:
    """Pods whose GPUs carry a reported slot; None when a slot's place is unknown: then all do.

    Args:
        node: the node as it reports.
        pods: slot uid -> uid of the pod that it borrows from.
    """
    if not node.slots:
        return _NOTHING
    if not node.slots.keys() <= pods.keys():
        return None
    return frozenset(pods[uid] for uid in node.slots)


def _models(models: tuple[NodeModel, ...] | None) -> frozenset[str] | None:
    """Names of what lies on a node; None where that is not known, or not all of it."""
    if models is None or len(models) >= MOST_MODELS:
        return None
    return frozenset(model.name for model in models)


def _replica(
    node: NodeReport,
    place: _NodeFacts,
    report: ReplicaReport,
    needs: tuple[Capability, ...] | None,
    used: int | None,
) -> lending.Replica:
    """One replica; its own word comes before what its node lacks to share the GPU as asked."""
    lacks = None if needs is None or report.refusal else node.missing(needs, report.gpu_uuids)
    return lending.Replica(
        uid=report.pod_uid,
        name=f"{report.pod_namespace}/{report.pod_name}",
        node=node.request.node,
        pool=report.pool,
        gpus=report.gpu_uuids,
        ready=report.ready,
        stopped=report.stopped,
        signal=report.signal,
        verified=report.verified,
        kv_permille=used,
        refusal=replica_refusal(lacks.reason if lacks else report.refusal),
        refusal_text=lacks.text if lacks else report.refusal_text or report.refusal,
        proven=report.gpu_proof == Proof.ALLOCATED,
        memory=report.lendable_text,
        lendable_bytes=lendable(report),
        gpu_bytes=report.memory.total if report.memory is not None else None,
        occupied=place.occupied is None or report.pod_uid in place.occupied,
        zone=place.zone,
        cordoned=place.cordoned,
        device_class=report.device_class,
        models=_models(node.request.models),
        stale=place.stale,
        group=unit(report) if report.place is not None else "",
    )


def _gather(found: dict[str, lending.Replica], group: ReportedGroup) -> None:
    """What is so of one pod of a group and concerns them all; telemetry is its leader's."""
    pods = [found[report.pod_uid] for _, report in group.pods]
    leader = pods[0]
    for one in pods:
        # Where several nodes claim it, that stays the word.
        refusal, text = one.refusal, one.refusal_text
        if refusal is None and group.refusal:
            refusal, text = Reason.MULTI_NODE_REPLICA, group.refusal
        elif refusal is None and leader.refusal in _OF_ALL_PODS:
            refusal, text = leader.refusal, leader.refusal_text
        found[one.uid] = replace(
            one,
            ready=all(pod.ready for pod in pods),
            stopped=one.stopped or leader.stopped,
            stale=one.stale or leader.stale,
            signal=leader.signal,
            verified=leader.verified,
            kv_permille=leader.kv_permille,
            refusal=refusal,
            refusal_text=text,
        )


def _spanning(one: lending.Replica, other: lending.Replica, world: ClusterState) -> lending.Replica:
    """What two nodes report: the newest report of the two, refused."""

    def silence(replica: lending.Replica) -> float:
        return world.telemetry.silence(replica.node, world.monotonic)

    fresh = min(one, other, key=silence)
    text = f"nodes {one.node} and {other.node} both report it"
    return replace(fresh, refusal=Reason.MULTI_NODE_REPLICA, refusal_text=text)
