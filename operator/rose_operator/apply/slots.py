"""RolloutSlot manifests: what a loan, a release and a changed lease write."""

from __future__ import annotations

import hashlib
from typing import Any

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
from rose_operator.kube.object_cache import Raw
from rose_operator.plan.slot_terms import engine_of, sharing_of

_NAME_LIMIT = 63


def slot_name(lease: RolloutLease, pod_uid: str) -> str:
    """One name per lease and replica: making a slot twice makes it once."""
    digest = hashlib.sha256(f"{lease.metadata.uid}/{pod_uid}".encode()).hexdigest()[:8]
    head = f"{lease.metadata.namespace}-{lease.metadata.name}".replace(".", "-")
    return f"{head[: _NAME_LIMIT - 9].rstrip('-')}-{digest}"


def lent(
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


def released(slot: RolloutSlot, reason: Reason) -> Raw:
    """The slot, to be given back."""
    changed = {"desired": Desired.RELEASED, "release_reason": str(reason)}
    spec = slot.spec.model_copy(update=changed)
    return _manifest(slot.metadata.name, slot.metadata.namespace, spec)


def updated(slot: RolloutSlot, lease: RolloutLease, pool: ServingPool | None) -> Raw | None:
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
