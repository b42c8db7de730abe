"""What became of each serving request: the predictor learns, the meters count, harm is judged.

Everything here follows a request's end, so it is never between an arrival and the closed permit.

| a finished request | tells |
|---|---|
| share of its time beside an open gate | the predictor: cost alone, or beside a rollout engine |
| latency / SLO, when it met an open gate | the margin |
| over the SLO or not | the error budget of its pool |
| longer than its certificate or not | how often that is exceeded |
| lent or withheld cycle, un-lent replica | the comparison for the relative limit |
| a busy period with a slow request, lent or withheld | what lending has made slow (``trial``) |

A burning budget or proven harm opens the pool's breaker. What is learned, and how, is
``rose_core.guard.experience``. Next step: ``replica`` puts all of this into the facts that the gate
is judged on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rose_agent.guard import metrics
from rose_agent.guard.flight.recorder import Recorder
from rose_agent.guard.replicas.pools import PoolState
from rose_core.guard import crossover
from rose_core.guard.budget import BUDGET_CAUSE
from rose_core.guard.certificate import CertificateCount, TtftCertificate
from rose_core.guard.crossover import Cycle, Cycles, Meter, withheld_share
from rose_core.guard.experience import Experience, RequestExposure
from rose_core.guard.margin import Margin
from rose_core.guard.predictor import Predictor
from rose_core.guard.shares import OpenTime
from rose_core.guard.slack import LatencyObjective
from rose_core.telemetry.book import FinishedRequest
from rose_core.telemetry.events import Arrived, Dismissed, FirstToken, Sized, TapEvent
from rose_core.wire.sync import PoolPolicy, SignalSource

_HARM_EVERY = 50
_HARM_QUANTILE = 0.9


@dataclass
class Counters:
    """Totals for the operator.

    Attributes:
        exposed: slow ones that had met an open gate.
        busy_of: the source that was asked last for busy time.
        busy_ns: what it said then.
        asked_ns: when.
    """

    finished: int = 0
    slow: int = 0
    exposed: int = 0
    busy_of: SignalSource | None = None
    busy_ns: int = 0
    asked_ns: int = 0


class Outcomes:
    """Outcomes of one replica's requests; single-threaded.

    Args:
        name: the pod's.
        pool: shared with the pool's other replicas here.
        recorder: the flight recorder.
        on_breach: called with a reason when the recorder is worth keeping.
        now_ns: the beginning.
        cycles: of which some are withheld.
    """

    def __init__(
        self,
        name: str,
        pool: PoolState,
        recorder: Recorder,
        on_breach: Callable[[str], None],
        now_ns: int,
        *,
        cycles: Cycles,
    ) -> None:
        self.pool, self.cycles = pool, cycles
        self.experience = Experience(now_ns, lessons=pool.lessons)
        self.meter = Meter()
        self.counters = Counters()
        self._name, self._recorder, self._on_breach = name, recorder, on_breach
        self._objective: tuple[PoolPolicy, float, LatencyObjective] | None = None

    @property
    def predictor(self) -> Predictor:
        """Cost of prefill and decode, as learned."""
        return self.experience.predictor

    @property
    def margin(self) -> Margin:
        """How much of a budget is kept back, as learned."""
        return self.experience.margin

    @property
    def open_time(self) -> OpenTime:
        """How long the gate has stood open."""
        return self.experience.open_time

    def observe(self, event: TapEvent, now_ns: int) -> None:
        """Note an event of a request; once its size is known, record its predicted cost."""
        if isinstance(event, Arrived):
            self.experience.begin(event.request, now_ns)
            self.cycles.begin(event.request, now_ns)
        elif isinstance(event, FirstToken):
            # It may have waited for the tap's heartbeat.
            self.experience.note_first_token(event.request, min(event.time_ns, now_ns))
        elif isinstance(event, Dismissed):
            self.experience.dismiss(event.request)
            self.cycles.dismiss(event.request)
        elif isinstance(event, Sized):
            self.experience.note_size(event.request, event.size, now_ns)
            predict = self.predictor.prefill_s
            self._recorder.note(
                now_ns,
                self._name,
                "predicted",
                request=event.request,
                size=event.size,
                alone=predict(event.size, shared=False),
                shared=predict(event.size, shared=True),
            )

    def certificate(self, policy: PoolPolicy, *, whole: bool) -> TtftCertificate | None:
        """What the next request on the empty replica is promised, as ``Experience.certificate``."""
        goals = self.objective(policy)
        return self.experience.certificate(goals, policy.percentile, whole=whole)

    @property
    def certified(self) -> CertificateCount:
        """Requests of the pool that were promised something, and those that took longer."""
        return self.experience.lessons.certified

    def note_stop(
        self, after_ns: int, chunk_divisor: int, *, had_turns: bool | None = None
    ) -> None:
        """An arrival has stopped a rollout engine beside this replica so soon after it.

        Args:
            after_ns: the arrival, nanoseconds.
            chunk_divisor: of the engine's permit.
            had_turns: the engine; None = not known.
        """
        self.experience.note_stop(after_ns / 1e9, chunk_divisor, had_turns=had_turns)

    def forget(self) -> None:
        """The tap is gone: requests under way are not followed to their end."""
        self.experience.forget()
        self.cycles.forget()

    def is_withheld(self, policy: PoolPolicy, now_ns: int, *, lent: bool) -> bool:
        """Whether lending is withheld now; ``lent``: a rollout engine serves beside this replica.

        Asked at every step: a cycle that has lasted for long enough ends here.
        """
        self._end(self.cycles.advance(now_ns, _share(policy)), lent=lent)
        return lent and self.cycles.withheld

    def _end(self, cycle: Cycle | None, *, lent: bool) -> None:
        if cycle is not None and lent:
            self.pool.trial = self.pool.trial.count(withheld=cycle.withheld, slow=cycle.slow)

    def record(self, done: FinishedRequest, policy: PoolPolicy, *, lent: bool, others: int) -> None:
        """Take one finished request.

        Args:
            done: the request.
            policy: the pool's.
            lent: a rollout engine serves beside this replica.
            others: requests still under way.
        """
        met = self.experience.learn(done, self.objective(policy), others)
        window = self._compare(done, policy, lent=lent, met=met)
        self._budget(met, policy, done.ended_ns)
        if met.exceeded is not None:
            metrics.child(metrics.CERTIFIED_REQUESTS, policy.pool, str(met.exceeded).lower()).inc()
        self._recorder.note(
            done.ended_ns,
            self._name,
            "finished",
            request=done.number,
            arrived=done.arrived_ns,
            ttft=done.ttft_s,
            tpot=done.tpot_s,
            tokens=done.tokens,
            status=done.status,
            how=done.how.value,
            window=window,
            shared=round(max(met.prefill, met.decode), 3),
        )
        if met.slow and met.exposed:
            self._on_breach("slow-request")
        if self.counters.finished % _HARM_EVERY == 0:
            self._judge_harm(policy, done.ended_ns)

    def _compare(
        self, done: FinishedRequest, policy: PoolPolicy, *, lent: bool, met: RequestExposure
    ) -> str:
        share = _share(policy)
        withheld, inside = self.cycles.end(done.number)
        ttft, tpot = done.ttft_s, done.tpot_s
        window = "withheld" if withheld else "lent"
        if lent and inside:
            self.meter.add(withheld=withheld, ttft_s=ttft, tpot_s=tpot)
            if met.used and self.cycles.draws(share):
                self.cycles.count(slow=met.slow)
                outcome = (self.pool.name, window, "false" if met.slow else "true")
                metrics.child(metrics.TRIAL_OUTCOMES, *outcome).inc()
        self._end(self.cycles.close(done.ended_ns, share), lent=lent)
        if not lent:
            self.pool.unlent.add(withheld=True, ttft_s=ttft, tpot_s=tpot)
        if ttft is not None:
            metrics.child(metrics.TTFT_SECONDS, self.pool.name, window).observe(ttft)
        if tpot is not None:
            metrics.child(metrics.TPOT_SECONDS, self.pool.name, window).observe(tpot)
        return window if lent else "un-lent"

    def _budget(self, met: RequestExposure, policy: PoolPolicy, now_ns: int) -> None:
        self.counters.finished += 1
        self.counters.slow += met.slow
        self.counters.exposed += met.slow and met.exposed
        metrics.child(metrics.SERVING_REQUESTS, policy.pool, "false" if met.slow else "true").inc()
        metrics.child(metrics.EXPOSED_MISSES, policy.pool).inc(met.slow and met.exposed)
        pool = self.pool
        if met.used and pool.spend(met, policy.percentile, now_ns):
            burn = pool.burn.burn(policy.percentile, pool.limits.long_ns, now_ns)
            self._trip(BUDGET_CAUSE, now_ns, slow=burn.slow, exposed=burn.exposed)

    def _judge_harm(self, policy: PoolPolicy, now_ns: int) -> None:
        limit = policy.max_increase_percent / 100
        harm = crossover.judge(self.meter, self.pool.unlent, limit, _HARM_QUANTILE)
        self.pool.judged = harm.against
        if harm.proven:
            self._trip("latency-increase", now_ns, against=harm.against)

    def _trip(self, cause: str, now_ns: int, **details: object) -> None:
        if self.pool.trip(cause, now_ns):
            metrics.BREAKER_TRIPS.labels(self.pool.name, cause).inc()
            self._recorder.note(now_ns, self._name, "breaker", cause=cause, **details)
            self._on_breach(cause)

    def objective(self, policy: PoolPolicy) -> LatencyObjective:
        """The pool's limits with the margin learned here."""
        margin, known = self.margin.value, self._objective
        if known is None or policy is not known[0] or margin != known[1]:
            objective = LatencyObjective(
                policy.ttft_milliseconds / 1000,
                policy.tpot_milliseconds / 1000,
                policy.max_increase_percent / 100,
                margin,
                policy.ttft_alone_milliseconds / 1000,
            )
            # Asked for several times in each step, and the margin moves with finished requests.
            known = self._objective = policy, margin, objective
        return known[2]


def _share(policy: PoolPolicy) -> float:
    return withheld_share(policy.withheld_percent, relative=bool(policy.max_increase_percent))
