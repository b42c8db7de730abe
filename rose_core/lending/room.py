"""Does a lease's engine fit into what may be lent? The figures, for people and for the planner.

Only the node can size an engine: it has the model's files and has measured engines of the kind. So
the first slot of a lease is made without a size; its engine host sizes the engine before it starts
it, and reports what it needs (``EngineNeeds``). From then on the lease is lent only replicas that
have as much, and a slot whose host has found too little, where the figures say the same, is taken
back, for another lease.

| engine's need | lendable | then |
|---|---|---|
| unknown | any | lent; the node sizes it, and starts nothing that it cannot size |
| known | unknown | lent; the node refuses it while the driver tells nothing |
| known | as much | lent |
| known | less | not lent to this lease: ``InsufficientMemory`` with both figures |

Of a replica that is lent whole nobody knows what will be free before serving sleeps; an engine that
is larger than its GPU fits in no case, and nobody is put to sleep for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rose_core.api.reasons import Reason
from rose_core.devices.memory import in_gib
from rose_core.lending.answers import Misfit, ReplicaDecision
from rose_core.lending.facts import Lease, PoolTerms, Replica, Slot
from rose_core.lending.planning_pass import PlanningPass

Cause = tuple[Reason, str]
_MOST_NAMED = 4  # device classes, so that a condition stays readable


def too_small(lease: Lease, replica: Replica) -> ReplicaDecision | None:
    """Why the lease's engine does not fit there; None when it does, or nobody knows."""
    needed, room = lease.needs.on(replica), replica.lendable_bytes
    if needed is None or room is None or needed <= room:
        return None
    text = f"the engine needs {in_gib(needed)} per GPU, {in_gib(room)} may be lent"
    return ReplicaDecision(replica.name, Reason.INSUFFICIENT_MEMORY, text)


def fits_nowhere(world: PlanningPass, pool: PoolTerms, lease: Lease) -> Cause | None:
    """Why no replica of the pool has room for the lease's engine, however free it becomes."""
    if any(lease.takes(one) and lease.fits_asleep(one) for one in world.full(pool.key)):
        return None  # one may be put to sleep for it
    known = [
        (replica.lendable_bytes, replica)
        for replica in world.members.get(pool.key, ())
        if lease.takes(replica) and replica.lendable_bytes is not None
    ]
    if not known or any(lease.fits(replica) for _, replica in known):
        return None
    most, roomiest = max(known, key=lambda one: (one[0], one[1].name))
    text = (
        f"the engine needs {in_gib(lease.needs.on(roomiest) or 0)} per GPU "
        f"with tp={lease.gpus_per_slot}, "
        f"the most lendable is {in_gib(most)} on {roomiest.node}"
    )
    return Reason.INSUFFICIENT_MEMORY, text


def found_too_small(world: PlanningPass, slot: Slot) -> Cause | None:
    """Why a slot is of no use to its lease: its node says so, and the figures say the same."""
    lease, replica = world.leases.get(slot.lease), world.replicas.get(slot.replica)
    if not slot.lacks_memory or lease is None or replica is None:
        return None
    if slot.whole:
        return None if lease.fits_asleep(replica) else _larger_than_its_gpu(lease, replica)
    found = too_small(lease, replica)
    return None if found is None else (found.reason, found.message)


def _larger_than_its_gpu(lease: Lease, replica: Replica) -> Cause:
    needed, there = in_gib(lease.needs.on(replica) or 0), in_gib(replica.gpu_bytes or 0)
    return (
        Reason.INSUFFICIENT_MEMORY,
        f"the engine needs {needed} per GPU, which has {there} in all",
    )


def misfits(world: PlanningPass) -> Mapping[str, tuple[Misfit, ...]]:
    """Pool key -> accepted leases that its GPUs cannot serve; a lease that has a slot fits."""
    found: dict[str, list[Misfit]] = defaultdict(list)
    classes = {
        key: Counter(replica.device_class for replica in replicas)
        for key, replicas in world.members.items()
    }
    for lease in world.snapshot.leases:
        if lease.refusal is not None or lease.suspended:
            continue
        for key in lease.pools:
            pool = world.pools.get(key)
            if pool is None or world.coming_in(lease, key):
                continue
            cause = (
                _of_no_class(lease, classes.get(key, Counter()))
                or _too_few(lease, world.members.get(key, ()))
                or (fits_nowhere(world, pool, lease) if lease.needs.nodes else None)
            )
            if cause is not None:
                found[key].append(Misfit(lease.key, *cause))
    return {key: tuple(sorted(each, key=lambda one: one.lease)) for key, each in found.items()}


def _of_no_class(lease: Lease, classes: Counter[str]) -> Cause | None:
    """Why no GPU is of a class that the lease takes; None while a replica's is unknown."""
    if not lease.device_classes or not classes or lease.device_classes & classes.keys():
        return None
    if "" in classes:
        return None
    text = f"it takes {_listed(sorted(lease.device_classes))}, the pool's replicas have " + _listed(
        [f"{count} {kind}" for kind, count in sorted(classes.items())]
    )
    return Reason.OTHER_DEVICE_CLASS, text


def _too_few(lease: Lease, replicas: Sequence[Replica]) -> Cause | None:
    """Why no replica is wide enough for one slot; None while one names no GPU."""
    most = max((len(replica.gpus) for replica in replicas), default=0)
    if lease.gpus_per_slot <= most or not all(replica.gpus for replica in replicas) or not most:
        return None
    text = f"gpusPerSlot is {lease.gpus_per_slot}, the pool's replicas have {most} GPUs at most"
    return Reason.TOO_FEW_GPUS, text


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
