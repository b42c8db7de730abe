"""Status of a RolloutSlot: what its node reported last; figures that move all the time stay out."""

from __future__ import annotations

from rose_core.api import ConditionType, Desired, Reason, RolloutSlot, SlotStatus
from rose_core.api.conditions import Statement
from rose_core.api.rolloutslot import AdapterStatus
from rose_core.guard.reasons import slot_reason
from rose_core.host_reasons import HOST_MEANING, SHOWN_IN_FULL, TROUBLE, HostReason
from rose_core.identity import is_base
from rose_core.lending import PlannerPolicy
from rose_core.wire.sync import SlotReport, SlotState
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.plan.telemetry import calm
from rose_operator.status.statuses import conditions, reason_of

# A slot that its guard keeps stopped for longer than this is no longer Ready.
_HELD_SECONDS = 30.0
_MOST_LABEL = 128
# Of an engine's message in its lease: what went wrong stands first, or last in its log.
_MOST_HEAD, _MOST_TAIL = 160, 320

_C = ConditionType
_R = Reason

_NOT_RUNNING = {
    SlotState.FAILED: Reason.ENGINE_FAILED,
    SlotState.STOPPED: Reason.GATE_HELD,
    SlotState.RELEASING: Reason.ENGINE_STOPPED,
}


def slot_state(slot: RolloutSlot, world: ClusterState) -> SlotState | None:
    """The reported state, without the guard's short stops; None when nobody reports it."""
    report = slot_report(slot, world)
    if report is None:
        return None
    if report.state is not SlotState.STOPPED:
        return report.state
    held = world.telemetry.stopped_seconds(slot.metadata.uid, world.monotonic)
    still = slot.status.state == SlotState.STOPPED
    return report.state if still or held >= _HELD_SECONDS else calm(report.state)


def slot_report(slot: RolloutSlot, world: ClusterState) -> SlotReport | None:
    """What the slot's node reported last about this generation of it."""
    report = world.telemetry.slot(slot.metadata.uid, slot.spec.member.node)
    if report is None or report.slot.generation != slot.metadata.generation:
        return None
    # A label beyond the API's bound is no version of ours.
    return report if len(report.version) <= _MOST_LABEL else None


def slot_label(slot: RolloutSlot, world: ClusterState) -> str:
    """The version that is attested on the slot's live weights, empty before the first."""
    report = slot_report(slot, world)
    return report.version if report is not None else ""


def slot_runs(slot: RolloutSlot, world: ClusterState) -> bool:
    """Whether the slot counts as ready: granted, running, with attested weights."""
    report = slot_report(slot, world)
    lent = slot.spec.desired is Desired.LENT
    return bool(lent and report and report.version) and slot_state(slot, world) is SlotState.RUNNING


def slot_trouble(slot: RolloutSlot, world: ClusterState) -> tuple[Reason, str] | None:
    """Why the slot's engine cannot start or go on, as its lease may hear it.

    Returns:
        A word, and a sentence that tells of nobody but the lease itself; None: nothing is wrong.
    """
    report = slot_report(slot, world)
    if report is None or slot.spec.desired is Desired.RELEASED:
        return None
    if report.state not in {SlotState.FAILED, SlotState.STARTING}:
        return None
    host_reason = HostReason(report.reason)
    if host_reason not in TROUBLE:
        return (_R.ENGINE_FAILED, "") if report.state is SlotState.FAILED else None
    text = report.message if host_reason in SHOWN_IN_FULL else HOST_MEANING[host_reason]
    return Reason(host_reason.value), _shortened(text)


def _shortened(text: str) -> str:
    """One line of bounded length; a log may hold anything."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) <= _MOST_HEAD + _MOST_TAIL:
        return line
    return f"{line[:_MOST_HEAD]} ... {line[-_MOST_TAIL:]}"


def slot_status(slot: RolloutSlot, world: ClusterState, policy: PlannerPolicy) -> SlotStatus:
    """Status of one slot; figures that move all the time stay out."""
    report = slot_report(slot, world)
    state = slot_state(slot, world)
    silent = world.telemetry.silence(slot.spec.member.node, world.monotonic) > policy.stale_seconds
    released = slot.spec.desired is Desired.RELEASED
    why = reason_of(slot.spec.release_reason) if released else _R.NOT_RECLAIMING
    statements = [
        _slot_ready(slot, report, state, silent),
        _slot_granted(slot, report, silent),
        Statement(_C.TELEMETRY_FRESH, not silent, _R.AGENT_SILENT if silent else _R.AS_EXPECTED),
        _slot_weights(report, frozen=slot.spec.weights.frozen),
        Statement(_C.RECLAIMING, released, why),
    ]
    status = SlotStatus(
        observed_generation=slot.metadata.generation,
        conditions=conditions(slot, statements, world.now),
        state=state or "",
        endpoint=report.endpoint if report else "",
        weight_version=report.version if report else "",
        weight_digest=report.digest if report else "",
        adapters=tuple(
            AdapterStatus(run=one.run, weight_version=one.version)
            for one in (report.adapters if report else ())
        ),
        reclaims=slot.status.reclaims,
    )
    if report is None or status == slot.status:
        return status
    # The count moves often: it is brought along with a transition, never written for itself.
    return status.model_copy(update={"reclaims": sum(report.reclaims.values())})


def _slot_ready(
    slot: RolloutSlot, report: SlotReport | None, state: SlotState | None, silent: bool
) -> Statement:
    if slot.spec.desired is Desired.RELEASED:
        return Statement(_C.READY, False, reason_of(slot.spec.release_reason))
    if report is None or silent:
        return Statement(_C.READY, None, _R.AGENT_SILENT if silent else _R.NOT_OBSERVED_YET)
    if state is SlotState.RUNNING:
        return Statement(
            _C.READY,
            bool(report.version),
            _R.ENGINE_RUNNING if report.version else _R.NO_VERSION_YET,
        )
    text = ": ".join(filter(None, (slot_reason(report.reason), report.message)))
    reason = _NOT_RUNNING.get(state, _R.ENGINE_STARTING) if state else _R.ENGINE_STARTING
    return Statement(_C.READY, False, reason, text, moving=True)


def _slot_granted(slot: RolloutSlot, report: SlotReport | None, silent: bool) -> Statement:
    if slot.spec.desired is Desired.RELEASED:
        return Statement(_C.GRANTED, False, reason_of(slot.spec.release_reason))
    if silent:
        return Statement(_C.GRANTED, False, _R.AGENT_SILENT, "its grant lapses")
    if report is None:
        return Statement(_C.GRANTED, None, _R.NOT_OBSERVED_YET)
    return Statement(_C.GRANTED, True, _R.GRANT_ISSUED)


def _slot_weights(report: SlotReport | None, *, frozen: bool) -> Statement:
    if report is None:
        return Statement(_C.WEIGHTS_SYNCED, None, _R.NOT_OBSERVED_YET)
    if not report.version:
        return Statement(_C.WEIGHTS_SYNCED, False, _R.NO_VERSION_YET)
    own = _R.FROZEN if frozen else _R.OWN_CHECKPOINT
    reason = own if is_base(report.version) else _R.VERSION_ATTESTED
    return Statement(_C.WEIGHTS_SYNCED, True, reason)
