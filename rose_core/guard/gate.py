"""Open, duty-cycled or closed, and why: the first rule that applies decides.

| regime | when | rule |
|---|---|---|
| bursty | there are idle gaps | closed from arrival to ``reopen`` after the last end |
| never idle | idle share below ``on_off_share``, SLO given | open for a share of each period |
| saturated | a slack is not positive | closed |

Unknown is never open. ``judge`` is called on every event and every tick; it keeps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rose_core.guard.predictor import Predictor
from rose_core.guard.reasons import GateReason
from rose_core.guard.slack import Objective, measure
from rose_core.telemetry.signal import ServingSignal


@dataclass(frozen=True)
class GateLimits:
    """Times of the gate, nanoseconds, and the border between the regimes.

    Attributes:
        reopen_ns: emptiness needed before opening.
        period_ns: control period of the duty cycle.
        on_off_share: idle share from which lending uses idle gaps only.
        least_duty: a smaller share is not worth a stop and a continue.
    """

    reopen_ns: int = 50_000_000
    period_ns: int = 100_000_000
    on_off_share: float = 0.05
    least_duty: float = 0.05


@dataclass(frozen=True)
class ReplicaFacts:
    """What the gate needs to know about the serving replica.

    Attributes:
        lending: the pool's mode is Lend.
        gone: a serving process has exited or its container restarted.
        settled: Ready and stable for long enough after a (re)start.
        memory_pressure: serving needs the memory now.
        idle_share: recent share of time without a request.
    """

    signal: ServingSignal
    stop_requested: bool = False
    lending: bool = True
    gone: bool = False
    ready: bool = True
    settled: bool = True
    memory_pressure: bool = False
    breaker_open: bool = False
    withheld: bool = False
    idle_share: float = 1.0
    objective: Objective = field(default_factory=Objective)
    predictor: Predictor = field(default_factory=Predictor)


@dataclass(frozen=True)
class Verdict:
    """The gate's position.

    Attributes:
        until_ns: how far an open permit may reach at most; 0 = no bound of its own.
        duty: share of the control period that is lent (1 when idle).
    """

    open: bool
    reason: GateReason
    until_ns: int = 0
    duty: float = 0.0


def closed(reason: GateReason) -> Verdict:
    """A closed gate."""
    return Verdict(open=False, reason=reason)


def judge(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> Verdict:
    """Where the gate of every slot on this replica stands now."""
    barred = _barred(facts)
    if barred is not None:
        return closed(barred)
    return (_idle if facts.signal.running == 0 else _busy)(facts, limits, now_ns)


def _barred(facts: ReplicaFacts) -> GateReason | None:
    signal = facts.signal
    doubt = GateReason(signal.doubt.value) if signal.doubt else GateReason.SIGNAL_MISSING
    rules = (
        (facts.stop_requested, GateReason.STOP_REQUESTED),
        (not facts.lending, GateReason.POOL_NOT_LENDING),
        (facts.gone, GateReason.SERVING_GONE),
        (not facts.ready, GateReason.SERVING_NOT_READY),
        (not facts.settled, GateReason.SERVING_SETTLING),
        (facts.memory_pressure, GateReason.MEMORY_PRESSURE),
        (signal.doubt is not None or signal.running is None, doubt),
        (facts.breaker_open, GateReason.BREAKER_OPEN),
        (facts.withheld, GateReason.WITHHELD),
    )
    return next((reason for applies, reason in rules if applies), None)


def _idle(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> Verdict:
    since = facts.signal.empty_since_ns
    if since is None or now_ns - since < limits.reopen_ns:
        return closed(GateReason.COOL_DOWN)
    return Verdict(open=True, reason=GateReason.IDLE, duty=1.0)


def _busy(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> Verdict:
    objective = facts.objective
    unmeasured = not facts.signal.requests
    without_goal = not (objective.ttft_s and objective.tpot_s)
    if unmeasured or without_goal or facts.idle_share >= limits.on_off_share:
        return closed(GateReason.SERVING_BUSY)
    slack = measure(facts.signal.requests, objective, facts.predictor, now_ns)
    if slack.prefill_s is not None and slack.prefill_s <= 0:
        return closed(GateReason.NO_PREFILL_SLACK)
    if slack.decode_s is not None and slack.decode_s <= 0:
        return closed(GateReason.NO_DECODE_SLACK)
    if slack.duty < limits.least_duty:
        return closed(GateReason.NO_DECODE_SLACK)
    # The open part lies at the start of each period of the clock, the same for every slot.
    start = now_ns - now_ns % limits.period_ns
    until = start + int(slack.duty * limits.period_ns)
    if now_ns >= until and slack.duty < 1.0:
        return Verdict(open=False, reason=GateReason.SLACK, duty=slack.duty)
    return Verdict(open=True, reason=GateReason.SLACK, until_ns=until, duty=slack.duty)
