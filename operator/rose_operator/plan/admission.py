"""What CEL cannot check: names that must exist, features this version lacks, who may borrow.

Pure. Objects that cannot even be read as their kind (a CRD of another version, a hand that wrote
past validation) become ``Unreadable`` and get their answer too, without stopping the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from pydantic import ValidationError

from rose_core.api import (
    PoolMode,
    Reason,
    RolloutLease,
    RolloutSlot,
    ServingPool,
    TenantPolicy,
)
from rose_core.api.arguments import refusals
from rose_core.api.poollending import AutoscalerCheck
from rose_core.lending.autoscalers import Autoscaler
from rose_core.lending.tenancy import Tenancy
from rose_operator.kube.object_cache import Raw
from rose_operator.weight_stores import Runs, may_follow

KindT = TypeVar("KindT", ServingPool, RolloutLease, RolloutSlot, TenantPolicy)


@dataclass(frozen=True)
class Refusal:
    """Why an object is not accepted."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Unreadable:
    """An object that is no valid instance of its kind."""

    raw: Raw
    refusal: Refusal


@dataclass(frozen=True)
class Parsed(Generic[KindT]):
    """Objects of one kind by key, and those that cannot be read."""

    good: Mapping[str, KindT]
    bad: tuple[Unreadable, ...]


@dataclass(frozen=True)
class Offer:
    """What this installation offers to leases."""

    stores: frozenset[str]
    engine_classes: frozenset[str]
    runs: Mapping[str, Runs] = field(default_factory=dict)


def parse_object(kind: type[KindT], raw: Raw) -> KindT | Unreadable | None:
    """Read one raw object; None for one that is being deleted: it counts as gone."""
    if raw["metadata"].get("deletionTimestamp"):
        return None
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        return Unreadable(raw, Refusal(Reason.INVALID_SPEC, _first(error)))


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


def pool_refusal(
    pool: ServingPool,
    autoscalers: Collection[Autoscaler] = (),
    pods: Collection[str] = (),
) -> Refusal | None:
    """Why the pool is not accepted, or None.

    Args:
        pool: as its owner wrote it.
        autoscalers: those of the cluster that follow figures of whole GPUs.
        pods: names of the pool's serving pods.
    """
    return _autoscaled(pool, autoscalers, pods)


def _autoscaled(
    pool: ServingPool, autoscalers: Collection[Autoscaler], pods: Collection[str]
) -> Refusal | None:
    if pool.spec.lending.autoscaler_check is AutoscalerCheck.IGNORE:
        return None
    namespace = pool.metadata.namespace
    found = [str(one) for one in autoscalers if any(one.scales(namespace, pod) for pod in pods)]
    if not found:
        return None
    text = (
        f"{'; '.join(sorted(found))}: rollouts raise that figure. Let it follow a figure of "
        "serving alone (rose_pool_serving_*), or set lending.autoscalerCheck to Ignore"
    )
    return Refusal(Reason.AUTOSCALER_CONFLICT, text)


def lease_refusal(
    lease: RolloutLease,
    pools: Mapping[str, ServingPool],
    refused: Mapping[str, Refusal],
    offer: Offer,
    now: datetime,
    *,
    labels: Mapping[str, str] | None = None,
) -> Refusal | None:
    """Why the lease is not accepted, or None.

    Args:
        lease: as its team wrote it.
        pools: those that can be read, by key.
        refused: why pools are not accepted, by key.
        offer: what the installation offers.
        now: wall clock.
        labels: of the lease's namespace; None where nobody reads them.
    """
    reasons = [
        _pool_refusal(lease, ref.key, pools.get(ref.key), refused.get(ref.key), labels)
        for ref in lease.spec.pools
    ]
    return (
        _contradicts_itself(lease)
        or _expired(lease, now)
        or _not_offered(lease, offer)
        or (None if None in reasons else reasons[0])
    )


def lending_pools(
    lease: RolloutLease,
    pools: Mapping[str, ServingPool],
    refused: Mapping[str, Refusal],
    labels: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Keys of the pools that lend to the lease, in its order; labels as in ``lease_refusal``."""
    return tuple(
        ref.key
        for ref in lease.spec.pools
        if _pool_refusal(lease, ref.key, pools.get(ref.key), refused.get(ref.key), labels) is None
    )


def expiry(lease: RolloutLease) -> datetime | None:
    """When the lease ends by itself."""
    if lease.spec.lifetime_seconds is None:
        return None
    return created(lease) + timedelta(seconds=lease.spec.lifetime_seconds)


def created(resource: ServingPool | RolloutLease | RolloutSlot) -> datetime:
    """When the object was made."""
    return datetime.fromisoformat(resource.metadata.creation_timestamp)


def _contradicts_itself(lease: RolloutLease) -> Refusal | None:
    """CEL refuses it too, but not objects that were stored before the rule or while it was away."""
    slots = lease.spec.slots
    if slots.min <= slots.max:
        return None
    return Refusal(Reason.INVALID_SPEC, f"slots.min {slots.min} is above slots.max {slots.max}")


def _expired(lease: RolloutLease, now: datetime) -> Refusal | None:
    end = expiry(lease)
    if end is None or now < end:
        return None
    text = f"its {lease.spec.lifetime_seconds} s ended at {end:%Y-%m-%dT%H:%M:%SZ}"
    return Refusal(Reason.LEASE_EXPIRED, text)


def _not_offered(lease: RolloutLease, offer: Offer) -> Refusal | None:
    spec = lease.spec
    if spec.engine_class not in offer.engine_classes:
        text = f"engineClass {spec.engine_class!r} is none of {_names(offer.engine_classes)}"
        return Refusal(Reason.UNKNOWN_ENGINE_CLASS, text)
    sentences = refusals(spec.engine_arguments)
    if sentences:
        return Refusal(Reason.ARGUMENT_NOT_ALLOWED, "; ".join(sentences))
    if spec.weights.frozen:  # follows nothing; which models there are, the nodes say
        return None
    if spec.weights.store_name not in offer.stores:
        text = f"storeName {spec.weights.store_name!r} is none of {_names(offer.stores)}"
        return Refusal(Reason.UNKNOWN_STORE, text)
    return _not_theirs(lease, offer)


def _not_theirs(lease: RolloutLease, offer: Offer) -> Refusal | None:
    weights, namespace = lease.spec.weights, lease.metadata.namespace
    store, allowed = weights.store_name, offer.runs.get(weights.store_name)
    if may_follow(allowed, namespace, weights.run):
        return None
    text = (
        f"namespace {namespace} may not follow run {weights.run!r} of store {store!r}; "
        "the platform's list of stores (value stores[].runs) says who may"
    )
    return Refusal(Reason.RUN_NOT_ALLOWED, text)


def runs_left_out(
    lease: RolloutLease, runs: Mapping[str, Runs], tenancy: Tenancy | None
) -> tuple[str, ...]:
    """Those of ``adapterRuns`` that the namespace may not follow; the others go on without them.

    Args:
        lease: as its team wrote it.
        runs: the platform's list, by store.
        tenancy: its policies; None where it has switched them off.
    """
    weights, namespace = lease.spec.weights, lease.metadata.namespace
    store = weights.store_name
    return tuple(
        run
        for run in weights.adapter_runs
        if not may_follow(runs.get(store), namespace, run)
        or (tenancy is not None and not tenancy.may_follow(namespace, store, run))
    )


def _pool_refusal(
    lease: RolloutLease,
    key: str,
    pool: ServingPool | None,
    refused: Refusal | None,
    labels: Mapping[str, str] | None,
) -> Refusal | None:
    if pool is None:
        text = f"there is no pool {key} (kubectl get servpool -A)"
        return Refusal(Reason.UNKNOWN_POOL, text)
    foreign = _lends_to_others(lease, pool, labels)
    if foreign is not None:
        return foreign
    if refused is not None:
        return Refusal(Reason.POOL_NOT_ACCEPTED, f"pool {pool.metadata.key}: {refused.message}")
    if pool.spec.mode is not PoolMode.LEND:
        text = f"pool {pool.metadata.key} is in mode {pool.spec.mode}; its owner sets Lend"
        return Refusal(Reason.POOL_NOT_LENDING, text)
    return None


def _lends_to_others(
    lease: RolloutLease, pool: ServingPool, labels: Mapping[str, str] | None
) -> Refusal | None:
    """The pool names other namespaces, and selects none with these labels."""
    lending = pool.spec.lending
    selector = lending.borrower_namespace_selector
    borrowers = lending.borrower_namespaces
    if not borrowers and selector is None:
        borrowers = (pool.metadata.namespace,)
    if lease.metadata.namespace in borrowers:
        return None
    if selector is None:
        text = (
            f"pool {pool.metadata.key} lends to {_names(borrowers)}; its owner adds others to "
            "lending.borrowerNamespaces"
        )
        return Refusal(Reason.NAMESPACE_NOT_ALLOWED, text)
    if labels is not None and selector.match_labels.items() <= labels.items():
        return None
    wanted = _names(f"{key}={value}" for key, value in selector.match_labels.items())
    also = f"{_names(borrowers)} and " if borrowers else ""
    why = (
        f"namespace {lease.metadata.namespace} has not all of these labels"
        if labels is not None
        else "labels are not read here, because tenancy is off"
    )
    text = f"pool {pool.metadata.key} lends to {also}namespaces with {wanted}; {why}"
    return Refusal(Reason.NAMESPACE_NOT_ALLOWED, text)


def _names(items: Iterable[str]) -> str:
    return ", ".join(sorted(items)) or "none"
