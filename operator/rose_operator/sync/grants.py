"""The answer to an agent: its grants and the pools' policies, from memory alone (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rose_core.adapters import TARGETS
from rose_core.api import Desired, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.rolloutslot import SlotSharing, SlotSpec, SlotWeights, Tier
from rose_core.api.servingpool import Compute, PoolSpec
from rose_core.api.wholereplica import WholeReplica
from rose_core.identity import FROZEN_RUN, GrantKey, SlotKey, SlotUid
from rose_core.lending.tenancy import Tenancy
from rose_core.wire.sync import (
    AdapterSpec,
    EngineSpec,
    Grant,
    PoolPolicy,
    RouterProof,
    Sharing,
    SleepTerms,
    WeightSource,
)
from rose_operator.apply.routers import attach_address, router_name
from rose_operator.plan.admission import runs_left_out
from rose_operator.settings import Settings
from rose_operator.weight_stores import may_follow
from rose_wire.bearer import lease_token


def grants_of(
    node: str,
    slots: Iterable[RolloutSlot],
    term: int,
    settings: Settings,
    authority: bytes = b"",
    *,
    others: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[Grant, ...]:
    """Every grant the node holds, by slot name.

    A slot whose store or run the platform's list no longer allows gets no grant: nodes dial nothing
    else, and serve no other team's weights.

    Args:
        node: its name.
        slots: of the cluster, or of the node.
        term: of the leader.
        settings: the platform's.
        authority: that of routers, PEM.
        others: runs of a lease beside its first, by the lease's uid. They are no part of a slot's
            specification, because an engine goes on when they change.
    """
    mine = (
        slot
        for slot in slots
        if slot.spec.desired is Desired.LENT
        and slot.spec.member.node == node
        and _allowed(slot, settings)
    )
    return tuple(
        _grant(slot, term, settings, authority, others.get(slot.spec.lease_ref.uid, ()))
        for slot in sorted(mine, key=lambda slot: slot.metadata.name)
    )


def adapter_runs(
    leases: Iterable[RolloutLease], settings: Settings, tenancy: Tenancy | None
) -> dict[str, tuple[str, ...]]:
    """Runs that leases follow beside their first, by the lease's uid; those they may follow."""
    found = {}
    for lease in leases:
        left_out = runs_left_out(lease, settings.runs, tenancy)
        runs = tuple(run for run in lease.spec.weights.adapter_runs if run not in left_out)
        if runs:
            found[lease.metadata.uid] = runs
    return found


def _allowed(slot: RolloutSlot, settings: Settings) -> bool:
    weights, namespace = slot.spec.weights, slot.spec.lease_ref.namespace
    if weights.frozen:
        return True
    runs = settings.runs.get(weights.store_name)
    return weights.store_name in settings.stores and may_follow(runs, namespace, weights.run)


def _grant(
    slot: RolloutSlot, term: int, settings: Settings, authority: bytes, others: tuple[str, ...]
) -> Grant:
    spec = slot.spec
    router = router_name(spec.lease_ref.namespace, spec.lease_ref.name)
    token = lease_token(settings.token, spec.lease_ref.key)
    return Grant(
        key=GrantKey(term, SlotKey(SlotUid(slot.metadata.uid), slot.metadata.generation)),
        ttl_seconds=settings.grant_seconds,
        slot_name=slot.metadata.name,
        lease=spec.lease_ref.key,
        pool=spec.pool_ref.key,
        pod_uid=spec.member.pod_uid,
        pod_name=spec.member.pod_name,
        gpu_uuids=spec.member.gpu_uuids,
        engine=EngineSpec(
            engine_class=spec.engine.engine_class,
            model=spec.engine.model,
            arguments=dict(spec.engine.arguments),
            context_tokens=spec.engine.context_tokens,
            kv_tokens=spec.engine.kv_tokens,
            max_running=spec.engine.max_running,
            ranks=spec.engine.ranks,
            drafts=spec.engine.drafts,
            kv_store_bytes=spec.engine.kv_store_gib << 30,
            sharing=_sharing(spec.sharing),
            kv_policy=spec.weights.kv_policy,
            adapter=_adapter(spec.weights),
        ),
        weights=_source(spec, settings, others),
        router=attach_address(router, settings),
        max_concurrent_turns=spec.engine.max_running,
        whole=spec.tier is Tier.WHOLE,
        proof=RouterProof(token, authority),
        lease_uid=spec.lease_ref.uid,
    )


def _adapter(weights: SlotWeights) -> AdapterSpec | None:
    if not weights.adapter_rank:
        return None
    targets = tuple(sorted(weights.adapter_targets or TARGETS))
    return AdapterSpec(weights.adapter_rank, targets, weights.adapter_slots)


def _source(spec: SlotSpec, settings: Settings, others: tuple[str, ...]) -> WeightSource:
    weights = spec.weights
    if weights.frozen:
        return WeightSource(endpoint="", run=FROZEN_RUN)
    return WeightSource(
        endpoint=settings.stores[weights.store_name],
        run=weights.run,
        max_staleness=weights.max_staleness_versions,
        others=others[: weights.adapter_slots - 1],
    )


def _sharing(spec: SlotSharing) -> Sharing:
    by_mps = spec.compute is Compute.MPS
    return Sharing(
        compute=spec.compute,
        percent=spec.compute_percent if by_mps else 0,
        memory_source=spec.memory_source,
        memory_limit=spec.memory_limit,
        busy_percent=(spec.busy_compute_percent or 0) if by_mps else 0,
    )


def policy_of(pool: ServingPool) -> PoolPolicy:
    """What the agents need to protect the pool without the operator."""
    spec = pool.spec
    return PoolPolicy(
        pool=pool.metadata.key,
        mode=spec.mode,
        labels=dict(spec.selector.match_labels),
        port=spec.engine.port,
        engine=spec.engine.kind,
        ttft_milliseconds=(spec.slo.ttft_milliseconds or 0) if spec.slo else 0,
        ttft_alone_milliseconds=(spec.slo.ttft_alone_milliseconds or 0) if spec.slo else 0,
        tpot_milliseconds=(spec.slo.tpot_milliseconds or 0) if spec.slo else 0,
        percentile=spec.slo.percentile if spec.slo else 99,
        max_increase_percent=spec.max_latency_increase_percent or 0,
        withheld_percent=spec.withheld_percent,
        allowed_signals=tuple(spec.allowed_signals),
        memory_headroom_gib=spec.lending.memory_headroom_gib,
        memory_headroom_percent=spec.lending.memory_headroom_percent,
        memory_regrow=spec.lending.memory_regrow,
        max_power_watts=spec.lending.max_power_watts or 0,
        compute=spec.compute,
        memory_source=spec.memory_source,
        max_compute_percent=_time_percent(spec),
        sleep=None if spec.whole_replica is None else _sleep(spec.whole_replica),
    )


def _time_percent(spec: PoolSpec) -> int:
    """The owner's limit where the guard has to keep it; all of the time is no limit."""
    if spec.compute is Compute.MPS or spec.max_compute_percent in {None, 100}:
        return 0
    return spec.max_compute_percent or 0


def _sleep(spec: WholeReplica) -> SleepTerms:
    return SleepTerms(
        spec.min_released_mebibytes << 20, float(spec.drain_seconds), float(spec.wake_seconds)
    )
