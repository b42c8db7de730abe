"""What a slot's engine is and how it shares its GPU, as its lease and its pool say now (pure)."""

from __future__ import annotations

from rose_core.api import RolloutLease, ServingPool
from rose_core.api.rolloutlease import Drafts
from rose_core.api.rolloutslot import SlotEngine, SlotSharing
from rose_core.api.servingpool import MPS_PERCENT, Compute


def engine_of(lease: RolloutLease) -> SlotEngine:
    """The engine of a lease's slots."""
    spec = lease.spec
    return SlotEngine(
        engine_class=spec.engine_class,
        model=spec.model.name,
        arguments=spec.engine_arguments,
        context_tokens=spec.context_tokens,
        kv_tokens=spec.kv_tokens,
        max_running=spec.max_trajectories_per_slot,
        ranks=spec.gpus_per_slot,
        drafts=spec.drafts is Drafts.ROUTER,
        kv_store_gib=spec.kv_store_gib,
    )


def sharing_of(pool: ServingPool) -> SlotSharing:
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
