"""One slot's whole life on its node: ``decide(state, seen, limits, now) -> (state, actions)``.

| phase | seen | next | orders |
|---|---|---|---|
| Absent | granted, replica lendable, host alive, no cordon | Starting | Ensure |
| Absent | otherwise | Absent | |
| Starting | host does not list it yet | Starting | Ensure again every 2 s |
| Starting, Present | engine listed, gate open | Present | Let go, Extend |
| Starting, Present | engine listed, gate closed | Present | Close, Hold, Freeze; Kill (computing) |
| Present | host was last told other weights to follow | Present | Ensure again every 2 s, beside |
| Starting, Present | engine listed, a pause (`PACED`) | Present | Close (the permit paces it) |
| Present | host's heartbeat stale | Present | Close, Freeze; after 15 s Kill |
| Present | memory pressure | Present | Close, Hold, Dormant; after 5 s -> Releasing |
| Present | dormant, gate open | Present | Let go, then Extend, Activate until it serves |
| any with an engine | vacating reason | Releasing | Close, Stop; after 6 s Freeze, Kill |
| Releasing | engine gone | Absent (cordoned when it had to be killed) | |

Every order is repeated until its proof is seen, so a lost message or a restarted neighbour needs
no case of its own. Next step: ``rose_agent.guard.loop`` carries the orders out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rose_core.guard.gate import GateVerdict
from rose_core.guard.ladder import LadderLimits, Rung, SlotAction, SlotOrder
from rose_core.guard.reasons import PACED, VACATING, GateReason
from rose_core.guard.standstill import StandstillPatience, disobeys
from rose_core.wire.host import EngineState


class SlotPhase(StrEnum):
    """Where a slot stands on its node."""

    ABSENT = "Absent"
    STARTING = "Starting"
    PRESENT = "Present"
    RELEASING = "Releasing"


STARTABLE = frozenset(
    {
        GateReason.IDLE,
        GateReason.SLACK,
        GateReason.SERVING_ASLEEP,
        GateReason.SERVING_BUSY,
        GateReason.NO_PREFILL_SLACK,
        GateReason.NO_DECODE_SLACK,
        GateReason.COOL_DOWN,
        GateReason.NOT_CERTIFIED,
        GateReason.COMPUTE_LIMIT,
        GateReason.WITHHELD,
    }
)
"""Gate positions in which an engine may be started: the replica is known, only busy now."""


@dataclass(frozen=True)
class EngineSeen:
    """The slot's engine as the host last listed it.

    Attributes:
        held: the host has confirmed that the guard holds it.
        asked: the host was asked to hold it and has not answered; it may hold it by now.
        frozen: the guard reads its cgroup as frozen.
        cpu_ns: processor time of its tree; None = not known.
    """

    state: EngineState
    generation: int
    held: bool = False
    asked: bool = False
    frozen: bool = False
    cpu_ns: int | None = None


@dataclass(frozen=True)
class SlotSeen:
    """What is known about a slot now.

    Attributes:
        granted: None while the agent has just started and nobody has told it yet.
        generation: of the grant.
        verdict: the gate of the replica.
        host_alive: the engine host answered its status call lately.
        heartbeat_ns: age of the host's heartbeat beside the permit; None = no permit.
        processes: the guard still sees processes of the engine.
        can_dormant: the engine can release weights and KV.
        weights_sent: the host's last order follows the grant's weights; runs of a lease come
            and go under one generation.
    """

    granted: bool | None
    generation: int
    verdict: GateVerdict
    engine: EngineSeen | None
    host_alive: bool
    heartbeat_ns: int | None = None
    processes: bool = False
    can_dormant: bool = False
    weights_sent: bool = True


@dataclass(frozen=True)
class SlotMachine:
    """State of one slot.

    Attributes:
        rung: how far the engine has been taken back.
        since_ns: when the phase or the rung was entered.
        ordered_ns: when the last order that needs a proof was sent.
        self_frozen: the guard froze the cgroup; only a confirmed hold makes that undone by the
            host, which alone continues engines.
        late_cpu_ns: the tree's processor time when it was first found late in standing still.
        unready_ns: since when serving has been unready.
        stale_ns: since when the host's heartbeat has been stale.
        weights_sent_ns: when the host was last sent other weights under the same generation.
        cordon_until_ns: no new engine before.
    """

    phase: SlotPhase = SlotPhase.ABSENT
    rung: Rung = Rung.TERMINATE
    since_ns: int = 0
    ordered_ns: int = 0
    self_frozen: bool = False
    killed: bool = False
    late_cpu_ns: int | None = None
    unready_ns: int = 0
    stale_ns: int = 0
    weights_sent_ns: int = 0
    failures: int = 0
    cordon_until_ns: int = 0


Step = tuple[SlotMachine, tuple[SlotAction, ...]]


@dataclass(frozen=True)
class _Now:
    """What a step is decided on, besides the state.

    Attributes:
        reason: the gate's, or that the slot is not granted.
        ns: the time.
    """

    seen: SlotSeen
    limits: LadderLimits
    reason: GateReason
    ns: int

    @property
    def stale(self) -> bool:
        """The engine host does not stop engines any more, as far as can be seen."""
        if self.seen.heartbeat_ns is None:
            return not self.seen.host_alive
        return self.seen.heartbeat_ns > self.limits.host_stale_ns

    @property
    def exists(self) -> bool:
        """There is an engine; with a dead host, processes of one."""
        engine = self.seen.engine
        listed = engine is not None and engine.state is not EngineState.GONE
        return listed or (self.seen.processes and not self.seen.host_alive)


def decide(state: SlotMachine, seen: SlotSeen, limits: LadderLimits, now_ns: int) -> Step:
    """Next state and orders; called on every event and every tick."""
    reason = seen.verdict.reason if seen.granted else GateReason.NOT_GRANTED
    now = _Now(seen, limits, reason, now_ns)
    state = _note_times(state, now)
    if not now.exists:
        return _without_engine(state, now)
    if state.phase is SlotPhase.RELEASING or _must_vacate(state, now):
        return _release(state, now)
    if now.stale:
        return _host_stale(state, now)
    return _with_engine(state, now)


def is_settled(state: SlotMachine, seen: SlotSeen) -> bool:
    """Whether nothing is left to be ordered: at an unchanged gate only the permit is written.

    As long as the same is seen and the host's heartbeat is fresh, ``decide`` finds this state again
    at any later moment, and orders what it has ordered before: to extend the permit, or to close
    it. So whoever has written the permit need not ask.

    Args:
        state: after a step.
        seen: what that step was decided on.
    """
    engine, verdict = seen.engine, seen.verdict
    if engine is None or not (seen.granted and seen.weights_sent):
        return False
    deadlines = state.self_frozen or state.unready_ns or state.stale_ns or state.weights_sent_ns
    if state.phase is not SlotPhase.PRESENT or deadlines or engine.generation < seen.generation:
        return False
    if verdict.open:
        runs = engine.state is EngineState.SERVING and not (engine.held or engine.asked)
        return runs and state.rung is Rung.NONE
    if verdict.reason in PACED:
        return True
    lasts = verdict.reason is not GateReason.MEMORY_PRESSURE and verdict.reason not in VACATING
    return lasts and engine.held and state.rung is Rung.STOP


def _note_times(state: SlotMachine, now: _Now) -> SlotMachine:
    unready = (state.unready_ns or now.ns) if now.reason is GateReason.SERVING_NOT_READY else 0
    stale = (state.stale_ns or now.ns) if now.stale else 0
    if unready == state.unready_ns and stale == state.stale_ns:
        return state
    return replace(state, unready_ns=unready, stale_ns=stale)


def _must_vacate(state: SlotMachine, now: _Now) -> bool:
    seen, limits = now.seen, now.limits
    if now.reason is GateReason.NOT_GRANTED:
        return seen.granted is False
    if now.reason is GateReason.SERVING_NOT_READY:
        return now.ns - state.unready_ns >= limits.unready_ns
    if now.reason is GateReason.MEMORY_PRESSURE:
        overdue = state.rung is Rung.DORMANT and now.ns - state.since_ns >= limits.dormant_ns
        dormant = seen.engine is not None and seen.engine.state is EngineState.DORMANT
        return not dormant and (overdue or not seen.can_dormant)
    return now.reason in VACATING


def _without_engine(state: SlotMachine, now: _Now) -> Step:
    if state.phase in {SlotPhase.RELEASING, SlotPhase.PRESENT}:
        state = _emptied(state, now)
    startable = now.seen.granted and now.seen.host_alive and now.reason in STARTABLE
    if not startable or now.ns < state.cordon_until_ns:
        return (replace(state, phase=SlotPhase.ABSENT), ())
    waits = now.ns - state.ordered_ns < now.limits.ensure_repeat_ns
    if state.phase is SlotPhase.STARTING and waits:
        return (state, ())
    started = replace(state, phase=SlotPhase.STARTING, ordered_ns=now.ns, rung=Rung.STOP)
    return (started, (SlotAction(SlotOrder.ENSURE, now.reason),))


def _emptied(state: SlotMachine, now: _Now) -> SlotMachine:
    """The engine is gone; one that had to be killed leaves a cordon, longer each time."""
    if not state.killed:
        return SlotMachine(since_ns=now.ns)
    failures, limits = state.failures + 1, now.limits
    rest = min(limits.cordon_ns * 2 ** min(failures, 8) // 2, limits.longest_cordon_ns)
    return SlotMachine(since_ns=now.ns, failures=failures, cordon_until_ns=now.ns + rest)


def _release(state: SlotMachine, now: _Now) -> Step:
    actions = [SlotAction(SlotOrder.CLOSE, now.reason)]
    if state.phase is not SlotPhase.RELEASING:
        state = replace(
            state, phase=SlotPhase.RELEASING, rung=Rung.TERMINATE, since_ns=now.ns, ordered_ns=0
        )
    overdue = now.ns - state.since_ns >= now.limits.terminate_ns
    if now.stale and not overdue:
        actions.append(SlotAction(SlotOrder.FREEZE, now.reason))
    if now.ns - state.ordered_ns >= now.limits.stop_repeat_ns:
        state = replace(state, ordered_ns=now.ns, killed=state.killed or overdue)
        actions.append(SlotAction(SlotOrder.STOP, now.reason))
        if overdue:
            actions.append(SlotAction(SlotOrder.KILL, now.reason))
    return (state, tuple(actions))


def _host_stale(state: SlotMachine, now: _Now) -> Step:
    reason = GateReason.HOST_STALE
    state = _at_rung(state, Rung.STOP, now.ns)
    actions = [SlotAction(SlotOrder.CLOSE, reason)]
    if not state.self_frozen or now.ns - state.ordered_ns >= now.limits.repeat_ns:
        state = replace(state, self_frozen=True, ordered_ns=now.ns)
        actions.append(SlotAction(SlotOrder.FREEZE, reason))
    if now.ns - state.stale_ns >= now.limits.host_dead_ns and not state.killed:
        state = replace(state, killed=True)
        actions.append(SlotAction(SlotOrder.KILL, reason))
    return (state, tuple(actions))


def _with_engine(state: SlotMachine, now: _Now) -> Step:
    engine, reason = now.seen.engine, now.reason
    if state.phase is not SlotPhase.PRESENT:
        # Deadlines of the ladder count from here: the engine has only just been listed.
        state = replace(
            state, phase=SlotPhase.PRESENT, rung=Rung.STOP, since_ns=now.ns, ordered_ns=0
        )
    if engine is not None and now.seen.granted and engine.generation < now.seen.generation:
        if now.ns - state.ordered_ns < now.limits.ensure_repeat_ns:
            return (state, (SlotAction(SlotOrder.CLOSE, reason),))
        state = replace(state, ordered_ns=now.ns)
        return (state, (SlotAction(SlotOrder.CLOSE, reason), SlotAction(SlotOrder.ENSURE, reason)))
    state, sent = _send_weights(state, now)
    state, actions = _at_gate(state, now)
    return (state, (*actions, *sent))


def _send_weights(state: SlotMachine, now: _Now) -> Step:
    """The engine goes on as it is; what it follows has changed."""
    if now.seen.weights_sent or not now.seen.granted:
        return (replace(state, weights_sent_ns=0) if state.weights_sent_ns else state, ())
    if state.weights_sent_ns and now.ns - state.weights_sent_ns < now.limits.ensure_repeat_ns:
        return (state, ())
    return (replace(state, weights_sent_ns=now.ns), (SlotAction(SlotOrder.ENSURE, now.reason),))


def _at_gate(state: SlotMachine, now: _Now) -> Step:
    if now.seen.verdict.open and now.seen.granted:
        return _open(state, now)
    if now.reason in PACED:
        return (state, (SlotAction(SlotOrder.CLOSE, now.reason),))
    return _close(state, now)


def _open(state: SlotMachine, now: _Now) -> Step:
    engine, verdict = now.seen.engine, now.seen.verdict
    held = engine is not None and engine.held
    frozen = engine is not None and engine.frozen
    dormant = engine is not None and engine.state is EngineState.DORMANT
    # A hold that was not answered yet: its answer waits until every thread stands still.
    asked = engine is not None and engine.asked
    state = _at_rung(state, Rung.NONE, now.ns)
    if state.self_frozen and not held:
        # What the guard froze only the host continues: by a hold it takes the tree over, and by
        # letting go it thaws it. Until the tree is seen to run, this goes round.
        if not frozen:
            state = replace(state, self_frozen=False)
        elif now.ns - state.ordered_ns >= now.limits.repeat_ns:
            return _repeat(state, SlotOrder.HOLD, now)
    until = now.ns + now.limits.permit_ns
    if verdict.until_ns:
        until = min(until, verdict.until_ns)
    extend = SlotAction(SlotOrder.EXTEND, now.reason, until, verdict.chunk_divisor)
    actions: tuple[SlotAction, ...] = (extend,)
    if held or asked:
        state, let_go = _repeat(state, SlotOrder.LET_GO, now)
        actions = (*let_go, *actions)
    elif dormant:  # it takes its memory back under the permit, and computes once it serves
        state, wake = _repeat(state, SlotOrder.ACTIVATE, now)
        actions = (*actions, *wake)
    return (state, actions)


def _close(state: SlotMachine, now: _Now) -> Step:
    if state.rung < Rung.STOP:
        state = _at_rung(state, Rung.STOP, now.ns)
        state = replace(state, ordered_ns=0, killed=False, late_cpu_ns=None)
    if now.seen.engine is not None and now.seen.engine.held:
        return _held(replace(state, self_frozen=False) if state.self_frozen else state, now)
    return _stop(state, now)


def _held(state: SlotMachine, now: _Now) -> Step:
    """The engine stands still, as the host has confirmed; it may have to give its memory back."""
    close = SlotAction(SlotOrder.CLOSE, now.reason)
    if now.reason is GateReason.MEMORY_PRESSURE and state.rung < Rung.DORMANT:
        return (
            _at_rung(state, Rung.DORMANT, now.ns),
            (close, SlotAction(SlotOrder.DORMANT, now.reason)),
        )
    return (state, (close,))


def _stop(state: SlotMachine, now: _Now) -> Step:
    """Ask the host for a hold; where that is late freeze the tree, where that is late kill it."""
    limits, engine = now.limits, now.seen.engine
    state, again = _repeat(state, SlotOrder.HOLD, now)
    actions = (SlotAction(SlotOrder.CLOSE, now.reason), *again)
    late = now.ns - state.since_ns
    frozen = engine is not None and engine.frozen
    if late >= limits.hold_ns and not frozen and (again or not state.self_frozen):
        state = replace(state, self_frozen=True)
        actions = (*actions, SlotAction(SlotOrder.FREEZE, now.reason))
    if frozen or state.killed or late <= limits.hold_ns + limits.freeze_ns:
        return (state, actions)
    state, kill = _overdue(state, engine, limits, late)
    return (state, (*actions, SlotAction(SlotOrder.KILL, now.reason)) if kill else actions)


def _overdue(
    state: SlotMachine, engine: EngineSeen | None, limits: LadderLimits, late_ns: int
) -> tuple[SlotMachine, bool]:
    """Whether a tree that does not stand still in time is killed."""
    cpu_ns = engine.cpu_ns if engine is not None else None
    patience = StandstillPatience(limits.hold_ns + limits.freeze_ns)
    kill = disobeys(patience, late_ns, state.late_cpu_ns, cpu_ns)
    first = cpu_ns if state.late_cpu_ns is None else state.late_cpu_ns
    return replace(state, killed=kill, late_cpu_ns=first), kill


def _repeat(state: SlotMachine, order: SlotOrder, now: _Now) -> Step:
    """The order, unless one that needs a proof was sent a moment ago."""
    if now.ns - state.ordered_ns < now.limits.repeat_ns:
        return (state, ())
    return (replace(state, ordered_ns=now.ns), (SlotAction(order, now.reason),))


def _at_rung(state: SlotMachine, rung: Rung, now_ns: int) -> SlotMachine:
    if state.rung is rung:
        return state
    return replace(state, rung=rung, since_ns=now_ns, ordered_ns=0)
