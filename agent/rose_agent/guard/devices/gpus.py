"""Tells replicas and slots what their GPUs can give: health, memory to lend, memory budget.

The engine host knows how large an engine is and decides whether it fits. The guard tells it the
free room with the order, and again while an engine is refused for lack of room. The guard also sees
which process holds how much memory: it reports to the host what an engine holds whose kind is being
measured, and an engine that has outgrown its size; the host remembers the one and ends the other.
Next step: ``rose_agent.devices.watch`` reads the driver.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rose_agent.devices.watch import DeviceWatch, LentState, PoolGpuTerms, ReplicaGpus
from rose_agent.guard.replicas.replica import GuardedReplica
from rose_agent.guard.slots.slot import GuardedSlot
from rose_agent.guard.sync import report
from rose_agent.pods.model import NodePods
from rose_core.api.names import PoolMode
from rose_core.devices.memory import MemorySum, overrun
from rose_core.devices.ownership import GpuParty
from rose_core.host_reasons import HostReason
from rose_core.identity import PodUid, SlotUid
from rose_core.wire.host import EngineState


def update_views(
    devices: DeviceWatch,
    replicas: Mapping[PodUid, GuardedReplica],
    slots: Mapping[SlotUid, GuardedSlot],
    residents: NodePods,
) -> None:
    """Give every replica the view of its GPUs, and its slots their budget.

    Args:
        devices: the driver's last reading.
        replicas: of this node, by pod.
        slots: of this node; those beside a replica hear its memory to lend.
        residents: every pod of the node, to name whose a process on a GPU is.
    """
    now_ns = time.monotonic_ns()
    for uid, replica in replicas.items():
        neighbours = [s for s in slots.values() if s.grant and s.grant.pod_uid == uid]
        engines = [slot.status for slot in neighbours if slot.status is not None]
        lent = LentState(
            frozenset(slots),
            tuple(engine.residue_bytes or 0 for engine in engines),
            sum(engine.released_bytes for engine in engines),
            " ".join(sorted(engine.version for engine in engines)),
        )
        terms = PoolGpuTerms.of(replica.policy)
        kv_permille = report.kv_permille(replica, now_ns)
        claim = replica.pod.claim
        party = GpuParty(
            uid,
            frozenset(replica.pod.pids),
            residents.names,
            residents.platform,
            claim.proof,
            terms.shared_faults,
        )
        replica.view = devices.view(claim, party, terms, lent, kv_permille)
        for slot in neighbours:
            _apply(slot, replica.view)
            slot.reserve = _reserve(slot, replica.view, terms)
        _note_unlent(replica, neighbours, now_ns)


def _reserve(slot: GuardedSlot, view: ReplicaGpus, terms: PoolGpuTerms) -> MemorySum | None:
    """The sum whose memory is kept back for the slot; None = none is, or nobody knows.

    Elastic memory is serving's whenever it wants it, and a replica that sleeps needs none.
    """
    is_whole = slot.grant is not None and slot.grant.whole
    return None if terms.elastic or is_whole else view.lendable.parts


def _note_unlent(replica: GuardedReplica, neighbours: Sequence[GuardedSlot], now_ns: int) -> None:
    """Count, for the pool, memory that is kept back beside GPUs that no slot holds.

    Serving does without it whether it is borrowed or not. A slot counts that of its own GPUs. A
    pool that only observes has kept none back for lending.
    """
    since_ns, replica.looked_ns = replica.looked_ns, now_ns
    policy, view = replica.policy, replica.view
    grants = [slot.grant for slot in neighbours if slot.grant is not None]
    asleep = any(grant.whole for grant in grants)
    parts = view.lendable.parts if view is not None else None
    if not since_ns or policy.mode == PoolMode.OBSERVE or asleep or parts is None:
        return
    if PoolGpuTerms.of(policy).elastic or not parts.total:
        return
    free = max(0, len(replica.pod.claim.gpus) - sum(grant.engine.ranks for grant in grants))
    gpu_ns = (now_ns - since_ns) * free
    replica.outcomes.pool.unlent_reserved_ns += gpu_ns * parts.kept_for_lending // parts.total


def _apply(slot: GuardedSlot, view: ReplicaGpus) -> None:
    slot.budget, slot.room = view.budget, view.lendable
    slot.device_class = view.device_class
    status = slot.status
    if status is None:
        return
    held, wanted = view.held.get(slot.uid), view.budget.permille
    changed = status.kv_permille is not None and status.kv_permille != wanted
    followed = status.measuring and held is not None
    if changed or followed or overrun(status.device_bytes, held):
        slot.limit_memory(wanted, held)
    if status.state is EngineState.FAILED and status.reason is HostReason.INSUFFICIENT_MEMORY:
        slot.renew_room()
