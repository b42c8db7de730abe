"""Status of a RolloutLease: its URL, its slots, why not more, what it has used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rose_core.api import (
    ConditionType,
    Desired,
    Explanation,
    LeaseStatus,
    Reason,
    RolloutLease,
    RolloutSlot,
)
from rose_core.api.conditions import Statement, timestamp
from rose_core.identity import is_base
from rose_core.lending import LeaseDecision
from rose_core.lending.routers import RouterDecision, RouterState
from rose_operator.plan.admission import Refusal, expiry
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.status.accounting import totals
from rose_operator.status.slot_status import slot_report, slot_runs, slot_trouble
from rose_operator.status.statuses import accepted, conditions, reason_of

_C = ConditionType
_R = Reason


def lease_status(
    lease: RolloutLease,
    world: ClusterState,
    outcome: LeaseDecision,
    *,
    router_url: str,
    router: RouterDecision,
    selector: str,
    router_ready: bool,
    explanation: Explanation | None = None,
) -> LeaseStatus:
    """Status of one lease."""
    refusal = world.refusals.get(lease.metadata.key)
    slots = world.slots_of(lease)
    running = [slot for slot in slots if slot_runs(slot, world)]
    versions = sorted({report.version for s in running if (report := slot_report(s, world))})
    reclaiming = [slot for slot in slots if slot.spec.desired is Desired.RELEASED]
    statements = [
        _lease_ready(
            lease,
            refusal,
            outcome,
            running=len(running),
            router_ready=router_ready,
            trouble=_trouble(slots, world),
        ),
        _lease_accepted(refusal, world.left_out.get(lease.metadata.key, ())),
        _lease_granted(lease, refusal, outcome),
        _lease_router(router, ready=router_ready),
        _lease_weights(versions, frozen=lease.spec.weights.frozen),
        _lease_reclaiming(reclaiming),
    ]
    end = expiry(lease)
    return LeaseStatus(
        observed_generation=lease.metadata.generation,
        conditions=conditions(lease, statements, world.now),
        router_url=router_url,
        selector=selector,
        slots_wanted=outcome.wanted,
        slots_granted=outcome.granted,
        slots_ready=len(running),
        weight_version=versions[0] if versions else "",
        expiration_time=timestamp(end) if end else None,
        totals=totals(lease, slots, world),
        explanation=explanation,
    )


def _lease_ready(
    lease: RolloutLease,
    refusal: Refusal | None,
    outcome: LeaseDecision,
    *,
    running: int,
    router_ready: bool,
    trouble: tuple[Reason, str] | None,
) -> Statement:
    least = max(1, lease.spec.slots.min)
    if refusal is not None:
        return Statement(_C.READY, False, refusal.reason, refusal.message)
    idle = outcome.reason is _R.IDLE
    if outcome.granted < least and not idle:
        return Statement(_C.READY, False, outcome.reason, outcome.message)
    if not router_ready:
        return Statement(_C.READY, False, _R.ROUTER_NOT_READY, "the router has no ready pod")
    if idle:  # turns are taken and wait for the slots that they bring back
        return Statement(_C.READY, True, outcome.reason, outcome.message)
    text = f"{running} of {outcome.granted} granted slots run"
    if trouble is not None:
        text = f"{text}; {trouble[1]}"
    if running < least:
        reason = trouble[0] if trouble else _R.SLOTS_NOT_READY
        return Statement(_C.READY, False, reason, text)
    return Statement(_C.READY, True, _R.SLOTS_READY, text if trouble else "")


def _trouble(slots: Sequence[RolloutSlot], world: ClusterState) -> tuple[Reason, str] | None:
    """The commonest word of slots that cannot start or go on, how many say what, and one message.

    None when nothing is wrong with any.
    """
    found = [one for slot in slots if (one := slot_trouble(slot, world)) is not None]
    if not found:
        return None
    ranked = sorted(
        Counter(reason for reason, _ in found).items(), key=lambda one: (-one[1], one[0])
    )
    reason = ranked[0][0]
    counts = ", ".join(f"{count} {name}" for name, count in ranked)
    message = min(text for name, text in found if name is reason)
    return reason, f"{counts}: {message}" if message else counts


def _lease_granted(
    lease: RolloutLease, refusal: Refusal | None, outcome: LeaseDecision
) -> Statement:
    if refusal is not None:
        return Statement(_C.GRANTED, False, refusal.reason)
    enough = outcome.reason is _R.IDLE or outcome.granted >= max(1, lease.spec.slots.min)
    return Statement(_C.GRANTED, enough, outcome.reason, outcome.message)


def _lease_router(router: RouterDecision, *, ready: bool) -> Statement:
    """Whether a router takes turns; where there is no pod, why."""
    if router.state is not RouterState.RUNS:
        return Statement(_C.ROUTER_READY, False, router.reason, router.message)
    if not ready:
        return Statement(_C.ROUTER_READY, False, _R.ROUTER_NOT_READY)
    return Statement(_C.ROUTER_READY, True, _R.ROUTER_ANSWERS)


def _lease_accepted(refusal: Refusal | None, left_out: Sequence[str]) -> Statement:
    """Whether admission takes the lease, and which of its runs it goes on without."""
    if refusal is not None or not left_out:
        return accepted(refusal)
    text = (
        f"left out of adapterRuns: {', '.join(left_out[:8])}; this namespace may not follow them. "
        "The platform's list of stores (value stores[].runs) and its TenantPolicy say who may"
    )
    return Statement(_C.ACCEPTED, True, _R.ACCEPTED, text)


def _lease_weights(versions: Sequence[str], *, frozen: bool) -> Statement:
    if not versions:
        asked = "its checkpoint yet" if frozen else "a version; has the run been published?"
        text = f"no engine has attested {asked}"
        return Statement(_C.WEIGHTS_SYNCED, False, _R.NO_VERSION_YET, text)
    shown = ", ".join(versions[:8])
    bases = [version for version in versions if is_base(version)]
    if bases and len(bases) < len(versions):
        # Engines hold the first publish, others do not yet; no turn begins there until they do.
        text = f"{shown}; engines with their own checkpoint get no turns until they have the run's"
        return Statement(_C.WEIGHTS_SYNCED, False, _R.MIXED_VERSIONS, text)
    if len(bases) > 1:
        text = f"the router uses one of {shown}; start engines from one checkpoint"
        return Statement(_C.WEIGHTS_SYNCED, False, _R.CHECKPOINTS_DIFFER, text)
    if bases:
        text = f"{shown}: what engines were started from; none has a published version yet"
        reason, text = (_R.FROZEN, shown) if frozen else (_R.OWN_CHECKPOINT, text)
        return Statement(_C.WEIGHTS_SYNCED, True, reason, text)
    if len(versions) > 1:
        return Statement(_C.WEIGHTS_SYNCED, True, _R.MIXED_VERSIONS, shown)
    return Statement(_C.WEIGHTS_SYNCED, True, _R.VERSION_ATTESTED, versions[0])


def _lease_reclaiming(slots: Sequence[RolloutSlot]) -> Statement:
    if not slots:
        return Statement(_C.RECLAIMING, False, _R.NOT_RECLAIMING)
    text = ", ".join(sorted(slot.metadata.name for slot in slots)[:8])
    return Statement(_C.RECLAIMING, True, reason_of(slots[0].spec.release_reason), text)
