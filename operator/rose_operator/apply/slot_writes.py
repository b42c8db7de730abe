"""Writes of slots: released, lent, deleted when vacated, following their lease and pool.

| slot | seen | write |
|---|---|---|
| lent | the plan takes it back | spec: Released, with the reason |
| none | the plan lends a replica | a new slot, named after lease and replica |
| released | its node reports without it, or is silent until its grant has surely lapsed | deleted |
| lent | engine, weights or sharing of lease and pool are others | spec: the new ones |

Each write concerns another slot, so a loan never waits for a release of its own pass. Next step:
``writer`` carries them out; ``notices`` tells the node.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from rose_core import lending
from rose_core.api import (
    Desired,
    Member,
    Reason,
    RolloutLease,
    RolloutSlot,
    ServingPool,
    SlotSpec,
)
from rose_core.api.common import API_VERSION, PoolReference
from rose_core.api.rolloutslot import (
    LeaseReference,
    SlotWeights,
    Tier,
)
from rose_core.wire.sync import ReplicaReport
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import Raw
from rose_operator.kube.writer import Write, Writer
from rose_operator.metrics import DECISIONS
from rose_operator.notices import Notices
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.plan.memo import Memo
from rose_operator.plan.slot_terms import engine_of, sharing_of
from rose_operator.plan.telemetry import NodeTelemetry

_log = logging.getLogger(__name__)

_NAME_LIMIT = 63


class SlotWrites:
    """What a pass writes about slots.

    Args:
        namespace: ROSE's own, where slots live.
        stale_seconds: a node that was heard within it says what it holds.
        lapse_seconds: a node silent for longer holds no grant any more.
        clock: the telemetry's.
    """

    def __init__(
        self,
        writer: Writer,
        telemetry: NodeTelemetry,
        notices: Notices,
        *,
        namespace: str,
        stale_seconds: float,
        lapse_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._writer, self._telemetry, self._notices = writer, telemetry, notices
        self._namespace = namespace
        self._stale_seconds, self._lapse_seconds = stale_seconds, lapse_seconds
        self._clock = clock
        self._follow: Memo[Raw | None] = Memo()

    def writes(self, world: ClusterState, plan: lending.LendingPlan) -> Iterator[Write]:
        """Every write that the plan and the world ask for, what is given back first."""
        yield from self._release(world, plan)
        yield from self._lend(world, plan)
        yield from self._delete_vacated(world)
        yield from self._update(world)

    def _release(self, world: ClusterState, plan: lending.LendingPlan) -> Iterator[Write]:
        by_name = {slot.metadata.name: slot for slot in world.slots.good.values()}
        for release in plan.releases:
            slot = by_name[release.slot]
            _log.info("release %s: %s (%s)", release.slot, release.reason, release.message)
            DECISIONS.labels("release", release.reason).inc()
            yield self._apply(slot.spec.member.node, released_slot(slot, release.reason))

    def _lend(self, world: ClusterState, plan: lending.LendingPlan) -> Iterator[Write]:
        found = {
            report.pod_uid: (node, report)
            for reports in world.reports.values()
            for node, report in reports
        }
        for lend in plan.lends:
            lease = world.leases.good[lend.lease]
            member = _member(*found[lend.replica], lease.spec.gpus_per_slot)
            if member is None:
                continue
            _log.info("lend %s on %s to %s", member.pod_name, member.node, lend.lease)
            DECISIONS.labels("lend", Reason.QUALIFIES).inc()
            pool = world.pools.good[found[lend.replica][1].pool]
            tier = Tier.WHOLE if lend.whole else Tier.SHARED
            yield self._apply(member.node, new_slot(lease, pool, member, self._namespace, tier))

    def _delete_vacated(self, world: ClusterState) -> Iterator[Write]:
        for slot in world.slots.good.values():
            if slot.spec.desired is Desired.RELEASED and self._vacated(slot):
                yield self._writer.delete(ObjectKind.SLOT, slot.metadata.name)

    def _vacated(self, slot: RolloutSlot) -> bool:
        """Its node reports without it, or is silent for so long that its grant has lapsed."""
        node = slot.spec.member.node
        silence = self._telemetry.silence(node, self._clock())
        if silence > self._stale_seconds or node not in self._telemetry.nodes:
            return silence > self._lapse_seconds
        return self._telemetry.slot(slot.metadata.uid, node) is None

    def _update(self, world: ClusterState) -> Iterator[Write]:
        """Slots follow their lease in engine and weights, and their pool in how GPUs are shared."""
        self._follow.begin_pass()
        for key, lease in world.leases.good.items():
            if key in world.refusals:
                continue
            for slot in world.slots_of(lease):
                if slot.spec.desired is not Desired.LENT:
                    continue
                manifest = self._followed(slot, lease, world.pools.good.get(slot.spec.pool_ref.key))
                if manifest is not None:
                    yield self._apply(slot.spec.member.node, manifest)

    def _followed(
        self, slot: RolloutSlot, lease: RolloutLease, pool: ServingPool | None
    ) -> Raw | None:
        """What the slot should say after a change of lease or pool; None for nothing new."""
        versions = lease.metadata.resource_version, pool and pool.metadata.resource_version
        return self._follow.get(
            slot.metadata.key, slot, versions, lambda: updated_slot(slot, lease, pool)
        )

    def _apply(self, node: str, manifest: Raw) -> Write:
        """A slot's spec, and word to its node that there is something to ask for."""
        write = self._writer.apply(ObjectKind.SLOT, manifest)

        async def run() -> None:
            await write.run()
            self._notices.notify([node])

        return replace(write, run=run)


def _member(node: str, report: ReplicaReport, gpus: int) -> Member | None:
    """So many of the replica's GPUs as a slot's member; None when its fields fit no object."""
    try:
        return Member(
            node=node,
            pod_name=report.pod_name,
            pod_uid=report.pod_uid,
            gpu_uuids=report.gpu_uuids[:gpus],
        )
    except ValidationError as error:
        _log.error("replica %s of node %s: %s", report.pod_name, node, error)
        return None


def slot_name(lease: RolloutLease, pod_uid: str) -> str:
    """One name per lease and replica: making a slot twice makes it once."""
    digest = hashlib.sha256(f"{lease.metadata.uid}/{pod_uid}".encode()).hexdigest()[:8]
    head = f"{lease.metadata.namespace}-{lease.metadata.name}".replace(".", "-")
    return f"{head[: _NAME_LIMIT - 9].rstrip('-')}-{digest}"


def new_slot(
    lease: RolloutLease,
    pool: ServingPool,
    member: Member,
    namespace: str,
    tier: Tier = Tier.SHARED,
) -> Raw:
    """A new slot."""
    spec = SlotSpec(
        lease_ref=LeaseReference(
            namespace=lease.metadata.namespace, name=lease.metadata.name, uid=lease.metadata.uid
        ),
        pool_ref=PoolReference(namespace=pool.metadata.namespace, name=pool.metadata.name),
        members=(member,),
        tier=tier,
        engine=engine_of(lease),
        weights=_weights(lease),
        sharing=sharing_of(pool),
    )
    return _manifest(slot_name(lease, member.pod_uid), namespace, spec)


def released_slot(slot: RolloutSlot, reason: Reason) -> Raw:
    """The slot, to be given back."""
    changed = {"desired": Desired.RELEASED, "release_reason": str(reason)}
    spec = slot.spec.model_copy(update=changed)
    return _manifest(slot.metadata.name, slot.metadata.namespace, spec)


def updated_slot(slot: RolloutSlot, lease: RolloutLease, pool: ServingPool | None) -> Raw | None:
    """The slot after its lease or its pool changed, None when nothing differs."""
    sharing = slot.spec.sharing if pool is None else sharing_of(pool)
    changed = {"engine": engine_of(lease), "weights": _weights(lease), "sharing": sharing}
    spec = slot.spec.model_copy(update=changed)
    if spec == slot.spec:
        return None
    return _manifest(slot.metadata.name, slot.metadata.namespace, spec)


def _weights(lease: RolloutLease) -> SlotWeights:
    weights = lease.spec.weights
    return SlotWeights(
        store_name=weights.store_name,
        run=weights.run,
        frozen=weights.frozen,
        adapter_rank=weights.adapter_rank,
        adapter_targets=weights.adapter_targets,
        adapter_slots=weights.adapter_slots,
        max_staleness_versions=weights.max_staleness_versions,
        kv_policy=weights.kv_policy,
    )


def _manifest(name: str, namespace: str, spec: SlotSpec) -> Raw:
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    return {
        "apiVersion": API_VERSION,
        "kind": "RolloutSlot",
        "metadata": metadata,
        "spec": spec.as_dict(),
    }
