"""What the operator says about pools, leases and slots: pure functions of the world and the plan.

The same world gives the same status byte for byte, which is why a restart writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rose_core.api import (
    Condition,
    ConditionType,
    Desired,
    LeaseStatus,
    PoolMode,
    PoolStatus,
    Reason,
    RolloutLease,
    RolloutSlot,
    ServingPool,
    SlotStatus,
)
from rose_core.api.conditions import Statement, merge, timestamp
from rose_core.lending import Outcome, Plan, Policy
from rose_core.wire.sync import ReplicaReport, SlotReport, SlotState
from rose_operator.accounting import totals
from rose_operator.admission import Refusal, expiry
from rose_operator.telemetry import calm
from rose_operator.world import World

# A slot that its guard keeps stopped for longer than this is no longer Ready.
_HELD_SECONDS = 30.0
# Fewer requests than this say nothing about a percentile.
_MIN_REQUESTS = 50

_C = ConditionType
_R = Reason

_NOT_RUNNING = {
    SlotState.FAILED: Reason.ENGINE_FAILED,
    SlotState.STOPPED: Reason.GATE_HELD,
    SlotState.RELEASING: Reason.ENGINE_STOPPED,
}


# Pools.


def pool_status(pool: ServingPool, world: World, plan: Plan, policy: Policy) -> PoolStatus:
    """Status of one pool."""
    key = pool.metadata.key
    reports = [
        (node.request.node, report)
        for node in world.telemetry.nodes.values()
        for report in node.request.replicas
        if report.pool == key
    ]
    lent = {
        slot.spec.member.pod_uid
        for slot in world.slots.good.values()
        if slot.spec.pool_ref.key == key and slot.spec.desired is Desired.LENT
    }
    qualified = sum(
        report.pod_uid in lent or plan.verdicts[report.pod_uid].reason is _R.QUALIFIES
        for _, report in reports
        if report.pod_uid in plan.verdicts
    )
    stale = sum(
        world.telemetry.silence(n, world.monotonic) > policy.stale_seconds for n, _ in reports
    )
    statements = _pool_statements(pool, world, [report for _, report in reports], stale)
    return PoolStatus(
        observed_generation=pool.metadata.generation,
        conditions=_conditions(pool, statements, world.now),
        replicas=len(reports),
        qualified_replicas=qualified,
        lent_replicas=len(lent),
    )


def _pool_statements(
    pool: ServingPool, world: World, reports: Sequence[ReplicaReport], stale: int
) -> list[Statement]:
    refusal = world.pool_refusals.get(pool.metadata.key)
    paused = pool.spec.mode is PoolMode.PAUSED
    return [
        _pool_ready(pool, refusal, len(reports) - stale),
        _accepted(refusal),
        _fresh(len(reports), stale),
        _verified(reports),
        _protected(pool, world, reports),
        Statement(_C.PAUSED, paused, _R.PAUSED_BY_OWNER if paused else _R.NOT_PAUSED),
    ]


def _pool_ready(pool: ServingPool, refusal: Refusal | None, fresh: int) -> Statement:
    if refusal is not None:
        return Statement(_C.READY, False, refusal.reason, refusal.message)
    if pool.spec.mode is PoolMode.PAUSED:
        return Statement(_C.READY, False, _R.PAUSED_BY_OWNER, "mode is Paused")
    if not fresh:
        return Statement(_C.READY, False, _R.NO_REPLICAS, "no agent reports a replica")
    observing = pool.spec.mode is PoolMode.OBSERVE
    return Statement(_C.READY, True, _R.OBSERVE_MODE if observing else _R.LENDING_ENABLED)


def _accepted(refusal: Refusal | None) -> Statement:
    if refusal is None:
        return Statement(_C.ACCEPTED, True, _R.ACCEPTED)
    return Statement(_C.ACCEPTED, False, refusal.reason, refusal.message)


def _fresh(count: int, stale: int) -> Statement:
    if not count:
        return Statement(_C.TELEMETRY_FRESH, None, _R.NO_REPLICAS, "no agent reports a replica")
    if not stale:
        return Statement(_C.TELEMETRY_FRESH, True, _R.ALL_REPLICAS_FRESH)
    text = f"{stale} of {count} replicas have no fresh telemetry"
    return Statement(_C.TELEMETRY_FRESH, False, _R.SOME_REPLICAS_STALE, text)


def _verified(reports: Sequence[ReplicaReport]) -> Statement:
    if not reports:
        return Statement(_C.SIGNAL_VERIFIED, None, _R.NO_REPLICAS)
    if all(report.verified for report in reports):
        return Statement(_C.SIGNAL_VERIFIED, True, _R.AS_EXPECTED)
    unverified = [report.pod_name for report in reports if not report.verified]
    contradicted = any(report.verified is False for report in reports)
    text = f"not verified: {', '.join(sorted(unverified)[:8])}"
    return Statement(
        _C.SIGNAL_VERIFIED, False if contradicted else None, _R.SIGNAL_NOT_VERIFIED, text
    )


def _protected(pool: ServingPool, world: World, reports: Sequence[ReplicaReport]) -> Statement:
    if pool.spec.slo is None:
        return Statement(_C.SERVING_PROTECTED, None, _R.NO_OBJECTIVE, "the pool names no slo")
    recent = [world.telemetry.recent(report.pod_uid) for report in reports]
    requests, slow = sum(r for r, _ in recent), sum(s for _, s in recent)
    if requests < _MIN_REQUESTS:
        text = f"fewer than {_MIN_REQUESTS} requests in the last minutes"
        return Statement(_C.SERVING_PROTECTED, None, _R.NOT_OBSERVED_YET, text)
    within = slow * 100 <= requests * (100 - pool.spec.slo.percentile)
    reason = _R.WITHIN_OBJECTIVE if within else _R.OBJECTIVE_MISSED
    text = f"{slow} of {requests} requests were slow, p{pool.spec.slo.percentile} is asked for"
    return Statement(_C.SERVING_PROTECTED, within, reason, text, moving=True)


# Slots.


def slot_state(slot: RolloutSlot, world: World) -> SlotState | None:
    """The reported state, without the guard's short stops; None when nobody reports it."""
    report = slot_report(slot, world)
    if report is None:
        return None
    if report.state is not SlotState.STOPPED:
        return report.state
    held = world.telemetry.stopped_seconds(slot.metadata.uid, world.monotonic)
    still = slot.status.state == SlotState.STOPPED
    return report.state if still or held >= _HELD_SECONDS else calm(report.state)


def slot_report(slot: RolloutSlot, world: World) -> SlotReport | None:
    """What the slot's node last said about this generation of it."""
    report = world.telemetry.slot(slot.metadata.uid, slot.spec.member.node)
    if report is None or report.slot.generation != slot.metadata.generation:
        return None
    return report


def slot_runs(slot: RolloutSlot, world: World) -> bool:
    """Whether the slot counts as ready: granted, running, with attested weights."""
    report = slot_report(slot, world)
    lent = slot.spec.desired is Desired.LENT
    return bool(lent and report and report.version) and slot_state(slot, world) is SlotState.RUNNING


def slot_status(slot: RolloutSlot, world: World, policy: Policy) -> SlotStatus:
    """Status of one slot; figures that move all the time stay out."""
    report = slot_report(slot, world)
    state = slot_state(slot, world)
    silent = world.telemetry.silence(slot.spec.member.node, world.monotonic) > policy.stale_seconds
    released = slot.spec.desired is Desired.RELEASED
    why = Reason(slot.spec.release_reason) if released else _R.NOT_RECLAIMING
    statements = [
        _slot_ready(slot, report, state, silent),
        _slot_granted(slot, report, silent),
        Statement(_C.TELEMETRY_FRESH, not silent, _R.AGENT_SILENT if silent else _R.AS_EXPECTED),
        _slot_weights(report),
        Statement(_C.RECLAIMING, released, why),
    ]
    return SlotStatus(
        observed_generation=slot.metadata.generation,
        conditions=_conditions(slot, statements, world.now),
        state=state or "",
        endpoint=report.endpoint if report else "",
        weight_version=report.version if report else "",
        weight_digest=report.digest if report else "",
        reclaims=slot.status.reclaims,
    )


def _slot_ready(
    slot: RolloutSlot, report: SlotReport | None, state: SlotState | None, silent: bool
) -> Statement:
    if slot.spec.desired is Desired.RELEASED:
        return Statement(_C.READY, False, Reason(slot.spec.release_reason))
    if report is None or silent:
        return Statement(_C.READY, None, _R.AGENT_SILENT if silent else _R.NOT_OBSERVED_YET)
    if state is SlotState.RUNNING:
        return Statement(
            _C.READY,
            bool(report.version),
            _R.ENGINE_RUNNING if report.version else _R.NO_VERSION_YET,
        )
    text = ": ".join(filter(None, (report.reason, report.message)))
    reason = _NOT_RUNNING.get(state, _R.ENGINE_STARTING) if state else _R.ENGINE_STARTING
    return Statement(_C.READY, False, reason, text, moving=True)


def _slot_granted(slot: RolloutSlot, report: SlotReport | None, silent: bool) -> Statement:
    if slot.spec.desired is Desired.RELEASED:
        return Statement(_C.GRANTED, False, Reason(slot.spec.release_reason))
    if silent:
        return Statement(_C.GRANTED, False, _R.AGENT_SILENT, "its grant lapses")
    if report is None:
        return Statement(_C.GRANTED, None, _R.NOT_OBSERVED_YET)
    return Statement(_C.GRANTED, True, _R.GRANT_ISSUED)


def _slot_weights(report: SlotReport | None) -> Statement:
    if report is None:
        return Statement(_C.WEIGHTS_SYNCED, None, _R.NOT_OBSERVED_YET)
    known = bool(report.version)
    return Statement(_C.WEIGHTS_SYNCED, known, _R.VERSION_ATTESTED if known else _R.NO_VERSION_YET)


# Leases.


def lease_status(
    lease: RolloutLease, world: World, outcome: Outcome, *, router_url: str, router_ready: bool
) -> LeaseStatus:
    """Status of one lease."""
    refusal = world.refusals.get(lease.metadata.key)
    slots = world.slots_of(lease)
    running = [slot for slot in slots if slot_runs(slot, world)]
    versions = sorted({report.version for s in running if (report := slot_report(s, world))})
    reclaiming = [slot for slot in slots if slot.spec.desired is Desired.RELEASED]
    statements = [
        _lease_ready(lease, refusal, outcome, len(running), router_ready),
        _accepted(refusal),
        _lease_granted(lease, refusal, outcome),
        _lease_weights(versions),
        _lease_reclaiming(reclaiming),
    ]
    end = expiry(lease)
    return LeaseStatus(
        observed_generation=lease.metadata.generation,
        conditions=_conditions(lease, statements, world.now),
        router_url=router_url,
        slots_wanted=outcome.wanted,
        slots_granted=outcome.granted,
        slots_ready=len(running),
        weight_version=versions[0] if versions else "",
        expiration_time=timestamp(end) if end else None,
        totals=totals(lease, slots, world),
    )


def _lease_ready(
    lease: RolloutLease, refusal: Refusal | None, outcome: Outcome, running: int, router_ready: bool
) -> Statement:
    least = max(1, lease.spec.slots.min)
    if refusal is not None:
        return Statement(_C.READY, False, refusal.reason, refusal.message)
    if outcome.granted < least:
        return Statement(_C.READY, False, outcome.reason, outcome.message)
    if not router_ready:
        return Statement(_C.READY, False, _R.ROUTER_NOT_READY, "the router has no ready pod")
    if running < least:
        text = f"{running} of {outcome.granted} granted slots run"
        return Statement(_C.READY, False, _R.SLOTS_NOT_READY, text)
    return Statement(_C.READY, True, _R.SLOTS_READY)


def _lease_granted(lease: RolloutLease, refusal: Refusal | None, outcome: Outcome) -> Statement:
    if refusal is not None:
        return Statement(_C.GRANTED, False, refusal.reason)
    enough = outcome.granted >= max(1, lease.spec.slots.min)
    return Statement(_C.GRANTED, enough, outcome.reason, outcome.message)


def _lease_weights(versions: Sequence[str]) -> Statement:
    if not versions:
        return Statement(_C.WEIGHTS_SYNCED, False, _R.NO_VERSION_YET)
    if len(versions) > 1:
        return Statement(_C.WEIGHTS_SYNCED, True, _R.MIXED_VERSIONS, ", ".join(versions[:8]))
    return Statement(_C.WEIGHTS_SYNCED, True, _R.VERSION_ATTESTED, versions[0])


def _lease_reclaiming(slots: Sequence[RolloutSlot]) -> Statement:
    if not slots:
        return Statement(_C.RECLAIMING, False, _R.NOT_RECLAIMING)
    text = ", ".join(sorted(slot.metadata.name for slot in slots)[:8])
    return Statement(_C.RECLAIMING, True, Reason(slots[0].spec.release_reason), text)


def _conditions(
    thing: ServingPool | RolloutLease | RolloutSlot, said: list[Statement], now: datetime
) -> tuple[Condition, ...]:
    generation = thing.metadata.generation
    return merge(thing.status.conditions, said, generation=generation, now=now)
