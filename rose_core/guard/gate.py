"""Open, duty-cycled or closed, and why: the first rule that applies decides.

| regime | when | rule |
|---|---|---|
| bursty | usable idle gaps (``regime``) | closed from arrival to ``reopen`` after the last end |
| bursty | the next request might miss its TTFT (``certificate``) | short chunks, or closed |
| never idle | usable idle share below ``on_off_share``, a limit given | a share of each period |
| saturated | a slack is not positive | closed |
| capped | the owner's share of this second is used up (``compute``) | closed until it is not |
| following | another node sees the replica's requests (``following``) | as its guard's lease says |

Unknown is never open. ``judge`` is called on every event, every tick and at
``GateVerdict.again_ns``, and keeps nothing. Next step: ``slot`` makes orders of the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rose_core.guard.certificate import TtftCertificate
from rose_core.guard.compute import ComputeWindow
from rose_core.guard.following import LeaderLease
from rose_core.guard.predictor import Predictor
from rose_core.guard.reasons import GateReason
from rose_core.guard.slack import LatencyObjective, Slack, measure
from rose_core.telemetry.events import PERIOD_NS
from rose_core.telemetry.signal import ServingSignal


@dataclass(frozen=True)
class GateLimits:
    """Times of the gate, nanoseconds, and the border between the regimes.

    Attributes:
        reopen_ns: emptiness needed before opening, at most.
        period_ns: control period of the duty cycle.
        overlap_ns: how far a permit for a whole period reaches into the next, whose step is seldom
            later than that.
        regime_ns: without usable gaps for so long, a replica is never idle.
        on_off_share: idle share from which lending uses idle gaps only.
        least_duty: a smaller share is not worth a stop and a continue.
    """

    reopen_ns: int = 50_000_000
    period_ns: int = PERIOD_NS
    overlap_ns: int = 20_000_000
    regime_ns: int = 5_000_000_000
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
        device_unfit: one of its GPUs is not fit to be lent (``rose_core.devices.health``).
        idle_share: recent share of time that was idle and usable (``regime.Gaps``).
        cool_down_ns: emptiness before opening, learned (``regime``); None = ``reopen_ns``.
        compute: what rollouts have had of the GPU lately, and the owner's limit on it.
        certificate: what the next request is promised beside an open gate; None = nothing is asked.
        following: words of the guard that sees the replica's requests; None = this one does, and
            ``signal`` says what of.
    """

    signal: ServingSignal
    stop_requested: bool = False
    lending: bool = True
    gone: bool = False
    ready: bool = True
    settled: bool = True
    memory_pressure: bool = False
    device_unfit: bool = False
    breaker_open: bool = False
    withheld: bool = False
    idle_share: float = 1.0
    cool_down_ns: int | None = None
    compute: ComputeWindow = field(default_factory=ComputeWindow)
    certificate: TtftCertificate | None = None
    following: LeaderLease | None = None
    objective: LatencyObjective = field(default_factory=LatencyObjective)
    predictor: Predictor = field(default_factory=Predictor)


@dataclass(frozen=True)
class GateVerdict:
    """The gate's position.

    Attributes:
        until_ns: how far an open permit may reach at most; 0 = no bound of its own.
        duty: share of the control period that is lent (1 when idle).
        again_ns: when the verdict may change by itself, without an event; 0 = it does not.
        slack: what it was decided on, for the flight recorder; None where none was measured.
        chunk_divisor: what an open permit divides the engine's prefill chunks by.
    """

    open: bool
    reason: GateReason
    until_ns: int = 0
    duty: float = 0.0
    again_ns: int = 0
    slack: Slack | None = None
    chunk_divisor: int = 1


def closed(reason: GateReason) -> GateVerdict:
    """A closed gate."""
    return GateVerdict(open=False, reason=reason)


def judge(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> GateVerdict:
    """Where the gate of every slot on this replica stands now."""
    barred = _barred(facts)
    if barred is not None:
        return closed(barred)
    if facts.following is not None:
        return _capped(_followed(facts.following, now_ns), facts.compute, now_ns)
    verdict = (_idle if facts.signal.running == 0 else _busy)(facts, limits, now_ns)
    return bounded(_capped(verdict, facts.compute, now_ns), facts.signal)


def _capped(verdict: GateVerdict, compute: ComputeWindow, now_ns: int) -> GateVerdict:
    """The verdict inside the owner's share of the GPU's time."""
    if not (verdict.open and compute.percent):
        return verdict
    left = compute.left_ns(now_ns)
    if left <= 0:
        share, again = compute.percent / 100, compute.again_ns(now_ns)
        return GateVerdict(False, GateReason.COMPUTE_LIMIT, 0, share, again, verdict.slack)
    return _until(verdict, now_ns + left)


def bounded(verdict: GateVerdict, signal: ServingSignal) -> GateVerdict:
    """The verdict, open no longer than the signal behind it is believed."""
    until = signal.believed_until_ns
    return _until(verdict, until) if verdict.open and until else verdict


def _until(verdict: GateVerdict, until_ns: int) -> GateVerdict:
    """The verdict, open no longer than that."""
    sooner = 0 < verdict.until_ns <= until_ns
    return verdict if sooner else replace(verdict, until_ns=until_ns)


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
        (facts.device_unfit, GateReason.DEVICE_UNFIT),
        (facts.following is None and (signal.doubt is not None or signal.running is None), doubt),
        (facts.breaker_open, GateReason.BREAKER_OPEN),
        (facts.withheld, GateReason.WITHHELD),
    )
    return next((reason for applies, reason in rules if applies), None)


def _followed(lease: LeaderLease, now_ns: int) -> GateVerdict:
    if not lease.holds(now_ns):
        return closed(GateReason.LEADER_SILENT)
    if not lease.is_open:
        return closed(lease.reason)
    return GateVerdict(True, lease.reason, lease.until_ns, 1.0)


def _idle(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> GateVerdict:
    if facts.certificate is not None and not facts.certificate.holds:
        return closed(GateReason.NOT_CERTIFIED)
    since = facts.signal.empty_since_ns
    rest = limits.reopen_ns if facts.cool_down_ns is None else facts.cool_down_ns
    if since is None or now_ns - since < rest:
        again = since + rest if since is not None else 0
        return GateVerdict(open=False, reason=GateReason.COOL_DOWN, again_ns=again)
    divisor = 1 if facts.certificate is None else facts.certificate.chunk_divisor
    return GateVerdict(open=True, reason=GateReason.IDLE, duty=1.0, chunk_divisor=divisor)


def _busy(facts: ReplicaFacts, limits: GateLimits, now_ns: int) -> GateVerdict:
    # 1. Without requests to measure, a limit to keep or in a bursty regime only idle gaps are used.
    if not facts.signal.requests or gaps_only(facts.objective, facts.idle_share, limits):
        return closed(GateReason.SERVING_BUSY)
    # 2. What each request has left if the gate closed now, and the share of time to lend.
    slack = measure(
        requests=facts.signal.requests,
        objective=facts.objective,
        predictor=facts.predictor,
        now_ns=now_ns,
        period_s=limits.period_ns / 1e9,
        tokens_until_ns=facts.signal.tokens_until_ns,
    )
    # 3. A waiting request would miss its TTFT: nothing can earn that back.
    if slack.prefill_s is not None and slack.prefill_s <= 0:
        return GateVerdict(open=False, reason=GateReason.NO_PREFILL_SLACK, slack=slack)
    # 4. A stream is late by more than a period, or so little may be lent that it is not worth it.
    late_ns = 0 if slack.decode_s is None else round(-slack.decode_s * 1e9)
    if late_ns >= limits.period_ns or slack.duty < limits.least_duty:
        return GateVerdict(open=False, reason=GateReason.NO_DECODE_SLACK, slack=slack)
    if late_ns >= 0 and slack.decode_s is not None:
        # 5. Late by less than a period: the next tokens earn it back, so this is only a pause.
        return GateVerdict(open=False, reason=GateReason.SLACK, duty=slack.duty, slack=slack)
    # 6. In time: open for the duty's share of every period.
    return _paced(slack, limits, now_ns)


def gaps_only(objective: LatencyObjective, idle_share: float, limits: GateLimits) -> bool:
    """Whether a replica with requests that can be measured is lent in its idle gaps alone."""
    return not objective.given or idle_share >= limits.on_off_share


def _paced(slack: Slack, limits: GateLimits, now_ns: int) -> GateVerdict:
    # The open part lies at the start of each period of the clock, the same for every slot.
    start = now_ns - now_ns % limits.period_ns
    until = start + int(slack.duty * limits.period_ns)
    reason, following = GateReason.SLACK, start + limits.period_ns
    if now_ns >= until and slack.duty < 1.0:
        return GateVerdict(False, reason, duty=slack.duty, again_ns=following, slack=slack)
    if slack.duty < 1.0:
        return GateVerdict(True, reason, until, slack.duty, until, slack)
    # A whole period: the next one begins with an open part too, so the permit reaches into it by
    # what a guard may be late. Else every engine would be stopped and continued at its border.
    return GateVerdict(True, reason, following + limits.overlap_ns, 1.0, following, slack)
