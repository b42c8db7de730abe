"""Objects and telemetry, read together: the one input of planning and of every status.

Pure: ``look`` parses and judges the objects, ``snapshot`` translates for the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rose_core import lending
from rose_core.api import Desired, Reason, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.reasons import replica_refusal
from rose_core.api.servingpool import Day, TimeWindow
from rose_core.wire.sync import ReplicaReport
from rose_operator.admission import (
    Offer,
    Parsed,
    Refusal,
    created,
    lease_refusal,
    parse,
    pool_refusal,
)
from rose_operator.store import Raw
from rose_operator.telemetry import Node, Telemetry

_DAYS = list(Day)


@dataclass(frozen=True)
class World:
    """Everything known at one moment.

    Attributes:
        refusals: lease key -> why it is not accepted.
        now: wall clock; ``monotonic`` is the telemetry's clock at the same moment.
    """

    pools: Parsed[ServingPool]
    leases: Parsed[RolloutLease]
    slots: Parsed[RolloutSlot]
    pool_refusals: Mapping[str, Refusal]
    refusals: Mapping[str, Refusal]
    telemetry: Telemetry
    now: datetime
    monotonic: float

    def slots_of(self, lease: RolloutLease) -> list[RolloutSlot]:
        """The lease's slots, leaving ones included."""
        return [
            slot
            for slot in self.slots.good.values()
            if slot.spec.lease_ref.uid == lease.metadata.uid
        ]


def look(
    pools: list[Raw],
    leases: list[Raw],
    slots: list[Raw],
    telemetry: Telemetry,
    *,
    offer: Offer,
    now: datetime,
    monotonic: float,
) -> World:
    """Read and judge all objects."""
    parsed_pools = parse(ServingPool, pools)
    parsed_leases = parse(RolloutLease, leases)
    found = {
        key: lease_refusal(lease, parsed_pools.good, offer, now)
        for key, lease in parsed_leases.good.items()
    }
    judged = {key: pool_refusal(pool) for key, pool in parsed_pools.good.items()}
    return World(
        pools=parsed_pools,
        leases=parsed_leases,
        slots=parse(RolloutSlot, slots),
        pool_refusals={key: refusal for key, refusal in judged.items() if refusal},
        refusals={key: refusal for key, refusal in found.items() if refusal},
        telemetry=telemetry,
        now=now,
        monotonic=monotonic,
    )


def snapshot(
    world: World,
    memory: lending.Memory,
    policy: lending.Policy,
    remembered_replicas: Mapping[str, int],
) -> lending.Snapshot:
    """The world as the planner wants it."""
    silence = {
        node: world.telemetry.silence(node, world.monotonic)
        for node in {*world.telemetry.nodes, *_nodes_of_slots(world)}
    }
    return lending.Snapshot(
        pools=tuple(
            _pool(pool, remembered_replicas.get(key, 0)) for key, pool in world.pools.good.items()
        ),
        replicas=_replicas(world),
        leases=tuple(
            _lease(lease, world.refusals.get(key)) for key, lease in world.leases.good.items()
        ),
        slots=tuple(_slot(slot) for slot in world.slots.good.values()),
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
    return lending.Pool(
        key=pool.metadata.key,
        max_replicas_percent=pool.spec.lending.max_replicas_percent,
        min_unlent_replicas=pool.spec.lending.min_unlent_replicas,
        allowed_signals=frozenset(pool.spec.allowed_signals),
        windows=tuple(_window(window) for window in pool.spec.lending.time_windows),
        remembered_replicas=remembered,
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


def _lease(lease: RolloutLease, refusal: Refusal | None) -> lending.Lease:
    return lending.Lease(
        key=lease.metadata.key,
        uid=lease.metadata.uid,
        pool=lease.spec.pool_ref.key,
        priority=lease.spec.priority,
        created=created(lease).timestamp(),
        min_slots=lease.spec.slots.min,
        max_slots=lease.spec.slots.max,
        refusal=refusal.reason if refusal else None,
    )


def _slot(slot: RolloutSlot) -> lending.Slot:
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
    )


def _replicas(world: World) -> tuple[lending.Replica, ...]:
    """Every replica once; one that two living nodes claim is refused."""
    found: dict[str, lending.Replica] = {}
    known = {slot.metadata.uid: slot for slot in world.slots.good.values()}
    for name in sorted(world.telemetry.nodes):
        node = world.telemetry.nodes[name]
        leaving = _occupied(node, known)
        for report in node.request.replicas:
            replica = _replica(world, name, node, report, leaving)
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


def _replica(
    world: World, name: str, node: Node, report: ReplicaReport, occupied: frozenset[str] | None
) -> lending.Replica:
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
        occupied=occupied is None or report.pod_uid in occupied,
    )


def _spanning(one: lending.Replica, other: lending.Replica) -> lending.Replica:
    fresh = min(one, other, key=lambda replica: replica.age_seconds)
    text = f"nodes {one.node} and {other.node} both report it"
    return replace(fresh, refusal=Reason.MULTI_NODE_REPLICA, refusal_text=text)


def utc(epoch_seconds: float) -> datetime:
    """Wall clock of a ``time.time()``."""
    return datetime.fromtimestamp(epoch_seconds, UTC)
