"""The world as the planner wants it: ``snapshot(world, ...)``, pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rose_core import lending
from rose_core.api import Desired, Reason, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.reasons import replica_refusal
from rose_core.api.rolloutlease import PreemptionPolicy
from rose_core.api.servingpool import Day, TimeWindow, WhenOpen
from rose_core.devices.capabilities import Missing
from rose_core.wire.sync import ReplicaReport
from rose_operator.admission import Refusal, created, expiry
from rose_operator.capabilities import missing
from rose_operator.loads import Loads
from rose_operator.protection import misses_objective
from rose_operator.surroundings import Surroundings
from rose_operator.telemetry import Node
from rose_operator.toggles import Toggles
from rose_operator.world import World

_DAYS = list(Day)


@dataclass(frozen=True)
class Knowledge:
    """What the operator has gathered besides objects and telemetry."""

    surroundings: Surroundings
    loads: Loads
    toggles: Toggles


def snapshot(
    world: World,
    memory: lending.Memory,
    policy: lending.Policy,
    remembered_replicas: Mapping[str, int],
    known: Knowledge,
) -> lending.Snapshot:
    """The world as the planner wants it."""
    now = world.now.timestamp()
    silence = {
        node: world.telemetry.silence(node, world.monotonic)
        for node in {*world.telemetry.nodes, *_nodes_of_slots(world)}
    }
    return lending.Snapshot(
        pools=tuple(
            replace(
                _pool(pool, remembered_replicas.get(key, 0)),
                outlook=known.loads.outlook(key, pool.spec.lending.forecast, now),
                breaker=_breaker(pool, world),
            )
            for key, pool in world.pools.good.items()
        ),
        replicas=_replicas(world, known.surroundings),
        leases=tuple(
            _lease(lease, world.refusals.get(key), known.toggles)
            for key, lease in world.leases.good.items()
        ),
        slots=tuple(
            _slot(slot, known.toggles.has_run(slot.metadata.uid))
            for slot in world.slots.good.values()
        ),
        silence=silence,
        reporting=frozenset(
            node
            for node, seconds in silence.items()
            if seconds <= policy.stale_seconds and node in world.telemetry.nodes
        ),
        memory=memory,
        policy=policy,
    )


def _nodes_of_slots(world: World) -> set[str]:
    return {slot.spec.member.node for slot in world.slots.good.values()}


def _pool(pool: ServingPool, remembered: int) -> lending.Pool:
    limits = pool.spec.lending
    return lending.Pool(
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
    )


def _breaker(pool: ServingPool, world: World) -> lending.Breaker:
    told = pool.spec.lending.breaker
    return lending.Breaker(
        missed=misses_objective(pool, world.reports_of(pool.metadata.key), world.telemetry),
        cooldown_seconds=told.cooldown_seconds,
        returns=told.when_open is WhenOpen.RETURN,
    )


def _window(window: TimeWindow) -> lending.Window:
    return lending.Window(
        days=frozenset(_DAYS.index(day) for day in window.days),
        start_minute=_minute(window.start_time),
        end_minute=_minute(window.end_time),
    )


def _minute(clock: str) -> int:
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)


def _lease(lease: RolloutLease, refusal: Refusal | None, toggles: Toggles) -> lending.Lease:
    end = expiry(lease)
    return lending.Lease(
        key=lease.metadata.key,
        uid=lease.metadata.uid,
        pool=lease.spec.pool_ref.key,
        priority=lease.spec.priority,
        created=created(lease).timestamp(),
        min_slots=lease.spec.slots.min,
        max_slots=lease.spec.slots.max,
        refusal=refusal.reason if refusal else None,
        weight=lease.spec.weight,
        preempts=lease.spec.preemption_policy is PreemptionPolicy.PREEMPT_LOWER_PRIORITY,
        ends_at=end.timestamp() if end else None,
        toggle_seconds=toggles.seconds(lease.metadata.uid),
    )


def _slot(slot: RolloutSlot, running: bool) -> lending.Slot:
    member = slot.spec.member
    return lending.Slot(
        name=slot.metadata.name,
        uid=slot.metadata.uid,
        lease=slot.spec.lease_ref.key,
        lease_uid=slot.spec.lease_ref.uid,
        pool=slot.spec.pool_ref.key,
        node=member.node,
        replica=member.pod_uid,
        gpus=member.gpu_uuids,
        created=created(slot).timestamp(),
        released=slot.spec.desired is Desired.RELEASED,
        running=running,
    )


@dataclass(frozen=True)
class _Place:
    """What all replicas of a node share; ``occupied`` as ``_occupied`` says."""

    zone: str
    cordoned: bool
    occupied: frozenset[str] | None


def _replicas(world: World, around: Surroundings) -> tuple[lending.Replica, ...]:
    """Every replica once; one that two living nodes claim is refused."""
    found: dict[str, lending.Replica] = {}
    known = {slot.metadata.uid: slot for slot in world.slots.good.values()}
    for name in sorted(world.telemetry.nodes):
        node = world.telemetry.nodes[name]
        zone, cordoned = around.zones.get(name, ""), name in around.cordoned
        place = _Place(zone, cordoned, _occupied(node, known))
        for report in node.request.replicas:
            lacks = missing(world.pools.good.get(report.pool), world, name, report)
            replica = _lacking(_replica(world, node, report, place), lacks)
            if report.pod_uid in found:
                replica = _spanning(replica, found[report.pod_uid])
            found[report.pod_uid] = replica
    return tuple(found.values())


def _occupied(node: Node, known: Mapping[str, RolloutSlot]) -> frozenset[str] | None:
    """Pods whose GPUs carry a reported slot; None when a slot's place is unknown: then all do."""
    pods = set()
    for uid in node.slots:
        if uid not in known:
            return None
        pods.add(known[uid].spec.member.pod_uid)
    return frozenset(pods)


def _replica(world: World, node: Node, report: ReplicaReport, place: _Place) -> lending.Replica:
    name = node.request.node
    kv = node.kv.get(report.pod_uid)
    return lending.Replica(
        uid=report.pod_uid,
        name=f"{report.pod_namespace}/{report.pod_name}",
        node=name,
        pool=report.pool,
        gpus=report.gpu_uuids,
        ready=report.ready,
        stopped=report.stopped,
        signal=report.signal,
        verified=report.verified,
        kv_permille=None if kv is None or report.kv_used_permille is None else round(kv),
        age_seconds=world.telemetry.silence(name, world.monotonic),
        refusal=replica_refusal(report.refusal),
        refusal_text=report.refusal,
        occupied=place.occupied is None or report.pod_uid in place.occupied,
        zone=place.zone,
        cordoned=place.cordoned,
    )


def _lacking(replica: lending.Replica, lacks: Missing | None) -> lending.Replica:
    """A replica whose node cannot share its GPU as the pool asks; its own word comes first."""
    if lacks is None or replica.refusal is not None:
        return replica
    return replace(replica, refusal=replica_refusal(lacks.word), refusal_text=lacks.text)


def _spanning(one: lending.Replica, other: lending.Replica) -> lending.Replica:
    fresh = min(one, other, key=lambda replica: replica.age_seconds)
    text = f"nodes {one.node} and {other.node} both report it"
    return replace(fresh, refusal=Reason.MULTI_NODE_REPLICA, refusal_text=text)
