"""The loan of a whole replica as the guard steers it: drain, sleep, lend, wake.

| phase | seen | next |
|---|---|---|
| Off | granted, the sleeper says Awake, no failure lately | Draining |
| Off | granted, the sleeper says Asleep (the guard was restarted) | Asleep |
| Off | the sleeper says anything else | Returning |
| Draining | not Ready, no request for a while, the sleeper says Awake | Drained |
| Draining, Drained | ``drain_s`` passed | Returning: NotDrained |
| Drained | Ready again | Returning: NotDrained |
| Drained | the sleeper says Asleep | Asleep |
| Drained | the sleeper wakes serving again | Returning: SleepRefused |
| Asleep | a request came | Returning: RequestWhileAsleep |
| Asleep | the sleeper says anything but Asleep | Returning |
| all but Off, Returning | no grant; the sleeper is silent | Returning |
| Returning | the sleeper says Awake, Ready | Off |

The guard extends the sleeper's permit in Draining, Drained and Asleep and in no other phase, so
that a guard that dies wakes serving by doing nothing; a rollout engine may be there in Asleep
alone. After a failure serving is left alone for ``rest_s``. Pure. Next step:
``rose_agent.guard.replicas.whole``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rose_core.api.reasons import Reason
from rose_core.devices.sleeper import SleepStage
from rose_core.guard.gate import GateVerdict, ReplicaFacts, bounded, closed
from rose_core.guard.reasons import GateReason


class WholePhase(StrEnum):
    """Where the loan stands; the table of the module has the edges."""

    OFF = "Off"
    DRAINING = "Draining"
    DRAINED = "Drained"
    ASLEEP = "Asleep"
    RETURNING = "Returning"


@dataclass(frozen=True)
class WholeLimits:
    """Times in seconds; ``drain_s`` is the owner's."""

    drain_s: float = 60.0
    rest_s: float = 600.0


@dataclass(frozen=True)
class WholeSeen:
    """What is known now.

    Attributes:
        granted: a whole slot is granted and nothing forbids it; None = not heard yet.
        stage: where serving stands, as the sleeper reports; None = it does not answer.
        ready: the serving pod is Ready.
        quiet: it has had no request for a while; None = unknown.
        busy: it has a request.
    """

    granted: bool | None
    stage: SleepStage | None = None
    ready: bool = True
    quiet: bool | None = None
    busy: bool = False


@dataclass(frozen=True)
class Whole:
    """State of one replica.

    Attributes:
        since_s: when the phase was entered.
        failure: why the last loan failed; None = it did not.
        failed_s: when.
    """

    phase: WholePhase = WholePhase.OFF
    since_s: float = 0.0
    failure: Reason | None = None
    failed_s: float = 0.0

    @property
    def asks(self) -> bool:
        """Whether the sleeper's permit is extended."""
        return self.phase in {WholePhase.DRAINING, WholePhase.DRAINED, WholePhase.ASLEEP}

    @property
    def drained(self) -> bool:
        """Whether serving may be put to sleep."""
        return self.phase in {WholePhase.DRAINED, WholePhase.ASLEEP}

    def refusal(self, limits: WholeLimits, now_s: float) -> Reason | None:
        """Why the replica cannot be lent whole, for the operator; None = it can."""
        if self.phase is WholePhase.RETURNING:
            return self.failure or Reason.SERVING_WAKING
        return self.failure if self.phase is WholePhase.OFF and self.rests(limits, now_s) else None

    def rests(self, limits: WholeLimits, now_s: float) -> bool:
        """Whether a loan failed lately, so that serving is left alone."""
        return self.failure is not None and now_s - self.failed_s < limits.rest_s


def decide(state: Whole, seen: WholeSeen, limits: WholeLimits, now_s: float) -> Whole:
    """The next state."""
    if state.phase is WholePhase.OFF:
        return _off(state, seen, limits, now_s)
    if state.phase is WholePhase.RETURNING:
        return _returning(state, seen, now_s)
    if seen.granted is False:
        return _to(state, WholePhase.RETURNING, now_s)
    if seen.stage is None:
        return _failed(state, Reason.SLEEPER_UNAVAILABLE, now_s)
    if state.phase is WholePhase.ASLEEP:
        return _asleep(state, seen, now_s)
    return _falling(state, seen, limits, now_s)


def _off(state: Whole, seen: WholeSeen, limits: WholeLimits, now_s: float) -> Whole:
    if seen.stage is SleepStage.ASLEEP and seen.granted:
        return _to(state, WholePhase.ASLEEP, now_s)
    if seen.stage not in {None, SleepStage.AWAKE}:
        # Not heard of a grant yet: the permit of the guard before this one runs for seconds.
        return state if seen.granted is None else _to(state, WholePhase.RETURNING, now_s)
    if not seen.granted or seen.stage is None or state.rests(limits, now_s):
        return state
    return _to(replace(state, failure=None), WholePhase.DRAINING, now_s)


def _falling(state: Whole, seen: WholeSeen, limits: WholeLimits, now_s: float) -> Whole:
    """Draining or Drained."""
    if state.phase is WholePhase.DRAINED:
        if seen.stage is SleepStage.ASLEEP:
            return _to(state, WholePhase.ASLEEP, now_s)
        if seen.stage not in {SleepStage.AWAKE, SleepStage.FALLING}:
            return _failed(state, Reason.SLEEP_REFUSED, now_s)
        if seen.ready:
            return _failed(state, Reason.NOT_DRAINED, now_s)
    elif not seen.ready and seen.quiet and seen.stage is SleepStage.AWAKE:
        return _to(state, WholePhase.DRAINED, now_s)
    overdue = now_s - state.since_s >= limits.drain_s and seen.stage is not SleepStage.FALLING
    return _failed(state, Reason.NOT_DRAINED, now_s) if overdue else state


def _asleep(state: Whole, seen: WholeSeen, now_s: float) -> Whole:
    if seen.stage is not SleepStage.ASLEEP:
        return _to(state, WholePhase.RETURNING, now_s)
    return _failed(state, Reason.REQUEST_WHILE_ASLEEP, now_s) if seen.busy else state


def _returning(state: Whole, seen: WholeSeen, now_s: float) -> Whole:
    if seen.stage is SleepStage.AWAKE and seen.ready:
        return _to(state, WholePhase.OFF, now_s)
    if seen.stage is SleepStage.BROKEN and state.failure is not Reason.WAKE_OVERDUE:
        return replace(state, failure=Reason.WAKE_OVERDUE, failed_s=now_s)
    return state


def _failed(state: Whole, failure: Reason, now_s: float) -> Whole:
    return _to(replace(state, failure=failure, failed_s=now_s), WholePhase.RETURNING, now_s)


def _to(state: Whole, phase: WholePhase, now_s: float) -> Whole:
    return replace(state, phase=phase, since_s=now_s)


def judge(facts: ReplicaFacts, phase: WholePhase) -> GateVerdict:
    """The gate of a whole slot: open only while serving sleeps and has no request."""
    doubt = facts.signal.doubt
    unknown = GateReason(doubt.value) if doubt else GateReason.SIGNAL_MISSING
    rules = (
        (facts.stop_requested, GateReason.STOP_REQUESTED),
        (not facts.lending, GateReason.POOL_NOT_LENDING),
        (facts.gone, GateReason.SERVING_GONE),
        (phase is not WholePhase.ASLEEP, GateReason.SERVING_AWAKE),
        (bool(facts.signal.running), GateReason.SERVING_BUSY),
        (facts.device_unfit, GateReason.DEVICE_UNFIT),
        (facts.signal.doubt is not None or facts.signal.running is None, unknown),
    )
    reason = next((reason for applies, reason in rules if applies), None)
    if reason:
        return closed(reason)
    return bounded(GateVerdict(True, GateReason.SERVING_ASLEEP, duty=1.0), facts.signal)
