"""May this replica be lent? The first reason why not, with its numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from rose_core.api.reasons import MEANING, Reason
from rose_core.identity import PodUid
from rose_core.lending.answers import ReplicaDecision
from rose_core.lending.facts import PlannerPolicy, PoolTerms, Replica
from rose_core.wire.sync import SignalSource

# A claim that nobody proves ends no loan, whoever makes it: else naming a GPU would be enough.
_KEEPING = frozenset({Reason.QUALIFIES, Reason.KV_USE_TOO_HIGH, Reason.GPU_CONTESTED})
# What an agent says of a GPU that carries our own slot is no reason to take the slot back.
_OWN_DOING = frozenset({Reason.GPU_IN_USE, Reason.INSUFFICIENT_MEMORY, Reason.COOLING_DOWN})

# Why a replica that was to be lent whole does not sleep (any more): the loan is over.
SLEEP_ENDED = frozenset(
    {
        Reason.NOT_DRAINED,
        Reason.SLEEP_REFUSED,
        Reason.SLEEPER_UNAVAILABLE,
        Reason.REQUEST_WHILE_ASLEEP,
        Reason.SERVING_WAKING,
        Reason.WAKE_OVERDUE,
    }
)

Check = Callable[[Replica, PoolTerms, PlannerPolicy], tuple[Reason, str] | None]


def _fresh(replica: Replica, _pool: PoolTerms, policy: PlannerPolicy) -> tuple[Reason, str] | None:
    if not replica.stale:
        return None
    return Reason.TELEMETRY_STALE, f"no report for more than {policy.stale_seconds:.0f} s"


def _not_stopped(
    replica: Replica, _pool: PoolTerms, _policy: PlannerPolicy
) -> tuple[Reason, str] | None:
    return (Reason.STOP_REQUESTED, "the stop button is pressed") if replica.stopped else None


def _stays(replica: Replica, _pool: PoolTerms, _policy: PlannerPolicy) -> tuple[Reason, str] | None:
    cordoned = f"node {replica.node} is cordoned; a drain may follow"
    return (Reason.NODE_CORDONED, cordoned) if replica.cordoned else None


def _not_sleepy(
    replica: Replica, _pool: PoolTerms, _policy: PlannerPolicy
) -> tuple[Reason, str] | None:
    """Asked before readiness, which a replica that slept lacks as well."""
    if replica.refusal not in SLEEP_ENDED:
        return None
    return replica.refusal, MEANING[replica.refusal]


def _ready(replica: Replica, _pool: PoolTerms, _policy: PlannerPolicy) -> tuple[Reason, str] | None:
    return None if replica.ready else (Reason.REPLICA_NOT_READY, "the serving pod is not Ready")


def _not_refused(
    replica: Replica, _pool: PoolTerms, _policy: PlannerPolicy
) -> tuple[Reason, str] | None:
    if replica.refusal is None:
        return None
    # An agent sends a word alone; people read what it means.
    text = replica.refusal_text
    return replica.refusal, MEANING[replica.refusal] if text == replica.refusal else text


def _has_gpu(
    replica: Replica, _pool: PoolTerms, _policy: PlannerPolicy
) -> tuple[Reason, str] | None:
    return None if replica.gpus else (Reason.NO_GPU, "the agent names no GPU of this replica")


def _signalled(
    replica: Replica, pool: PoolTerms, _policy: PlannerPolicy
) -> tuple[Reason, str] | None:
    if replica.signal is None:
        allowed = ", ".join(sorted(pool.allowed_signals)) or "none"
        text = f"no source shows whether it is busy; allowedSignals has {allowed}"
        return Reason.SIGNAL_MISSING, text
    if replica.signal not in pool.allowed_signals:
        return Reason.SIGNAL_NOT_ALLOWED, f"{replica.signal} is not in allowedSignals"
    return None


def _verified(
    replica: Replica, _pool: PoolTerms, _policy: PlannerPolicy
) -> tuple[Reason, str] | None:
    # Only the tap counts requests beside the engine; the engine's own figures verify themselves.
    tapped = replica.signal == SignalSource.WIRE_TAP
    if replica.verified or (replica.verified is None and not tapped):
        return None
    if replica.verified is None:
        text = "the tap's request count has not been compared with the engine's yet"
        return Reason.SIGNAL_NOT_VERIFIED, text
    return Reason.SIGNAL_NOT_VERIFIED, "the tap's request count does not equal the engine's"


def _roomy(replica: Replica, _pool: PoolTerms, policy: PlannerPolicy) -> tuple[Reason, str] | None:
    used = replica.kv_permille
    if used is None or used <= policy.max_kv_permille:
        return None
    text = f"KV use {used} permille, limit {policy.max_kv_permille} permille"
    return Reason.KV_USE_TOO_HIGH, text


CHECKS: tuple[Check, ...] = (
    _fresh,
    _not_stopped,
    _stays,
    _not_sleepy,
    _ready,
    _not_refused,
    _has_gpu,
    _signalled,
    _verified,
    _roomy,
)


def verdict(replica: Replica, pool: PoolTerms, policy: PlannerPolicy) -> ReplicaDecision:
    """Whether the replica is fit to be lent for the first time."""
    for check in CHECKS:
        refused = check(replica, pool, policy)
        if refused is not None:
            return ReplicaDecision(replica.name, *refused)
    used = "unknown" if replica.kv_permille is None else f"{replica.kv_permille} permille"
    return ReplicaDecision(replica.name, Reason.QUALIFIES, f"KV use {used}")


def still_fit(found: ReplicaDecision) -> bool:
    """Whether a replica with this verdict may keep the slot it has."""
    return found.reason in _KEEPING or found.reason in _OWN_DOING


def still_asleep(found: ReplicaDecision) -> bool:
    """The same for a slot for which serving sleeps: that it is not Ready is our own doing."""
    return still_fit(found) or found.reason is Reason.REPLICA_NOT_READY


def contests(replicas: tuple[Replica, ...]) -> dict[PodUid, ReplicaDecision]:
    """What becomes of replicas that name the same GPU, by uid.

    | proven owners | the owner | the others |
    |---|---|---|
    | one | as if nobody else named it | ``GpuNotOwned``: nothing is lent, slots are taken back |
    | several | ``SpansReplicas``: the same | ``GpuNotOwned`` |
    | none | | ``GpuContested``: nothing is lent, slots that exist stay |
    """
    claims: dict[str, list[Replica]] = defaultdict(list)
    for replica in replicas:
        for gpu in replica.devices:
            claims[gpu].append(replica)
    found: dict[PodUid, ReplicaDecision] = {}
    for claimants in claims.values():
        if len(claimants) > 1:
            for one, decision in _contest(claimants):
                # Of several contests the one that takes slots back counts.
                before = found.get(one.uid)
                if decision is not None and (before is None or still_fit(before)):
                    found[one.uid] = decision
    return found


def _contest(claimants: list[Replica]) -> Iterator[tuple[Replica, ReplicaDecision | None]]:
    owners = [one for one in claimants if one.proven]
    names = ", ".join(sorted(one.name for one in owners or claimants))
    for one in claimants:
        if not owners:
            text = f"{names} name the same GPU, and nobody proves whose it is"
            yield one, ReplicaDecision(one.name, Reason.GPU_CONTESTED, text)
        elif not one.proven:
            text = f"the GPU that it names is allocated to {names}"
            yield one, ReplicaDecision(one.name, Reason.GPU_NOT_OWNED, text)
        elif len(owners) > 1:
            text = f"the GPU is allocated to {names}"
            yield one, ReplicaDecision(one.name, Reason.SPANS_REPLICAS, text)
        else:
            yield one, None
