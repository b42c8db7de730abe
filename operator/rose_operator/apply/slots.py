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
    SlotEngine,
    SlotSharing,
    SlotWeights,
    Tier,
)
from rose_core.api.servingpool import MPS_PERCENT, Compute
from rose_operator.kube.object_cache import Raw

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
        engine=_engine(lease),
        weights=_weights(lease),
        sharing=_sharing(pool),
    )
    return _manifest(slot_name(lease, member.pod_uid), namespace, spec)


def released(slot: RolloutSlot, reason: Reason) -> Raw:
    """The slot, to be given back."""
    changed = {"desired": Desired.RELEASED, "release_reason": str(reason)}
    spec = slot.spec.model_copy(update=changed)
    return _manifest(slot.metadata.name, slot.metadata.namespace, spec)


def updated(slot: RolloutSlot, lease: RolloutLease, pool: ServingPool | None) -> Raw | None:
    """The slot after its lease or its pool changed, None when nothing differs."""
    sharing = slot.spec.sharing if pool is None else _sharing(pool)
    changed = {"engine": _engine(lease), "weights": _weights(lease), "sharing": sharing}
    spec = slot.spec.model_copy(update=changed)
    if spec == slot.spec:
        return None
    return _manifest(slot.metadata.name, slot.metadata.namespace, spec)


def _engine(lease: RolloutLease) -> SlotEngine:
    spec = lease.spec
    return SlotEngine(
        engine_class=spec.engine_class,
        model=spec.model.name,
        arguments=spec.engine_arguments,
        context_tokens=spec.context_tokens,
        kv_tokens=spec.kv_tokens,
        max_running=spec.max_trajectories_per_slot,
    )


def _sharing(pool: ServingPool) -> SlotSharing:
    """A share is copied where one is given, so that other pools' engines need not start anew."""
    spec = pool.spec
    shared = SlotSharing(
        compute=spec.compute, memory_source=spec.memory_source, memory_limit=spec.memory_limit
    )
    if spec.compute is not Compute.MPS:
        return shared
    shares = {
        "compute_percent": spec.max_compute_percent or MPS_PERCENT,
        "busy_compute_percent": spec.busy_compute_percent,
    }
    return shared.model_copy(update=shares)


def _weights(lease: RolloutLease) -> SlotWeights:
    weights = lease.spec.weights
    return SlotWeights(
        store_name=weights.store_name,
        run=weights.run,
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
