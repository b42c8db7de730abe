"""One serving replica as the guard keeps it: tap's book, polled figures, predictor, meters."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import aiohttp

from rose_agent.guard import metrics
from rose_agent.guard.recorder import Recorder
from rose_agent.pods.model import ServingPod
from rose_agent.signals.http import EngineReader
from rose_agent.signals.snapshot import Snapshot
from rose_core.guard.crossover import Meter, Schedule
from rose_core.guard.gate import ReplicaFacts
from rose_core.guard.predictor import Predictor
from rose_core.guard.slack import Objective
from rose_core.telemetry import signal as signals
from rose_core.telemetry.book import Book, Finished
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import TapEvent
from rose_core.telemetry.paths import generates
from rose_core.telemetry.signal import Limits, Reading, ServingSignal
from rose_core.telemetry.verify import Verification
from rose_core.wire.sync import PoolPolicy, SignalSource

_QUIET_NS = 150_000_000
_BEAT_SECONDS = 0.12  # longer than the tap's heartbeat
_SHARED_NS = 5_000_000  # a gate that closed this soon after the arrival did not share the prefill
_LASTING_NS = 5_000_000_000
_BREAKER_NS = 300_000_000_000


def _base(pod: ServingPod) -> str:
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    return f"http://{host}:{pod.port}"


@dataclass
class Counters:
    """Totals for the operator."""

    finished: int = 0
    slow: int = 0
    busy_ns: int = 0
    asked_ns: int = 0


@dataclass
class Replica:
    """One replica.

    Attributes:
        gone: a serving process has exited and no new one has settled.
        lent: a rollout engine serves beside this replica; before that there is nothing to
            withhold and nothing to compare.
        last_open_ns: when a gate on this replica was last open.
        breaker_until_ns: lending rests because measured harm exceeded the limit.
    """

    pod: ServingPod
    policy: PoolPolicy
    recorder: Recorder
    schedule: Schedule
    limits: Limits
    book: Book
    reader: EngineReader
    snapshot: Snapshot | None = None
    readings: dict[SignalSource, Reading] = field(default_factory=dict)
    verification: Verification = field(default_factory=Verification)
    predictor: Predictor = field(default_factory=Predictor)
    meter: Meter = field(default_factory=Meter)
    counters: Counters = field(default_factory=Counters)
    gone: bool = False
    gone_since_ns: int = 0
    exited: set[int] = field(default_factory=set)
    settled: bool = True
    last_open_ns: int = 0
    breaker_until_ns: int = 0
    source: SignalSource | None = None
    known_ns: int = 0
    lent: bool = False

    @classmethod
    def create(
        cls,
        pod: ServingPod,
        policy: PoolPolicy,
        recorder: Recorder,
        schedule: Schedule,
        session: aiohttp.ClientSession,
    ) -> Replica:
        """A replica that has just been found."""
        reader = EngineReader(session, _base(pod), policy.engine)
        book = Book(time.monotonic_ns())
        return cls(pod, policy, recorder, schedule, Limits(), book, reader)

    def update(self, pod: ServingPod, policy: PoolPolicy) -> None:
        """Take what has become of the pod and its pool."""
        if pod.address != self.pod.address or policy.engine != self.policy.engine:
            self.reader.aim(_base(pod), policy.engine)
            self.verification = Verification()
        self.pod, self.policy = pod, policy

    def signal(self, now_ns: int) -> ServingSignal:
        """Every source merged."""
        merged = signals.merge(
            self.book,
            self.verification.verified,
            tuple(self.readings.values()),
            allowed=self.policy.allowed_signals,
            limits=self.limits,
            now_ns=now_ns,
        )
        if merged.source is not None:
            self.source, self.known_ns = merged.source, now_ns
        return merged

    def lasting_source(self, now_ns: int) -> SignalSource | None:
        """The living source; a short doubt closes the gate but is no news for the operator."""
        fresh = self.known_ns and now_ns - self.known_ns < _LASTING_NS
        return self.source if fresh else None

    def objective(self) -> Objective:
        """The pool's limits."""
        policy = self.policy
        return Objective(
            policy.ttft_milliseconds / 1000,
            policy.tpot_milliseconds / 1000,
            policy.max_increase_percent / 100,
        )

    def facts(self, now_ns: int, *, stop_pressed: bool) -> ReplicaFacts:
        """What the gate needs to know."""
        return ReplicaFacts(
            signal=self.signal(now_ns),
            stop_requested=stop_pressed or self.pod.stopped,
            lending=self.policy.mode == "Lend",
            gone=self.gone,
            ready=self.pod.ready,
            settled=self.settled,
            breaker_open=now_ns < self.breaker_until_ns,
            withheld=self.lent and self.schedule.withheld(now_ns / 1e9),
            idle_share=self.book.idle_share(now_ns),
            objective=self.objective(),
            predictor=self.predictor,
        )

    def take(self, event: TapEvent, now_ns: int) -> None:
        """Apply one event of the tap."""
        finished = self.book.apply(event, now_ns)
        if finished is not None:
            self._finish(finished, now_ns)

    def _finish(self, done: Finished, now_ns: int) -> None:
        ttft, tpot = done.ttft_s, done.tpot_s
        self._learn(done, ttft, tpot)
        withheld = self.schedule.withheld(done.arrived_ns / 1e9)
        inside = self.schedule.window(done.arrived_ns / 1e9) == self.schedule.window(
            done.ended_ns / 1e9
        )
        if inside and self.lent:
            self.meter.add(withheld=withheld, ttft_s=ttft, tpot_s=tpot)
        window = "withheld" if withheld else "lent"
        if ttft is not None:
            metrics.TTFT_SECONDS.labels(self.policy.pool, window).observe(ttft)
        if tpot is not None:
            metrics.TPOT_SECONDS.labels(self.policy.pool, window).observe(tpot)
        self._judge(ttft, tpot)
        self.recorder.note(
            done.ended_ns,
            self.pod.name,
            "finished",
            request=done.number,
            arrived=done.arrived_ns,
            ttft=ttft,
            tpot=tpot,
            tokens=done.tokens,
            status=done.status,
            how=done.how.value,
            window=window,
        )
        if self.counters.finished % 50 == 0 and self.meter.harmful(
            self.policy.max_increase_percent / 100, 0.9
        ):
            self.breaker_until_ns = now_ns + _BREAKER_NS
            self.recorder.note(now_ns, self.pod.name, "breaker")

    def _learn(self, done: Finished, ttft: float | None, tpot: float | None) -> None:
        if ttft is not None:
            shared = self.last_open_ns > done.arrived_ns + _SHARED_NS
            self.predictor = self.predictor.saw_prefill(done.size, ttft, shared=shared)
        if tpot is not None:
            shared = self.last_open_ns > done.first_ns + _SHARED_NS
            running = 1 + len(self.book.live)
            self.predictor = self.predictor.saw_decode(running, tpot, shared=shared)

    def _judge(self, ttft: float | None, tpot: float | None) -> None:
        objective = self.objective()
        slow = bool(
            (ttft is not None and objective.ttft_s and ttft > objective.ttft_s)
            or (tpot is not None and objective.tpot_s and tpot > objective.tpot_s)
        )
        self.counters.finished += 1
        self.counters.slow += slow
        met = "false" if slow else "true"
        metrics.SERVING_REQUESTS.labels(self.policy.pool, met).inc()

    # --- polled sources

    def note_figures(self, source: SignalSource, figures: Figures, now_ns: int) -> None:
        """Add one answer of a polled source."""
        self.readings[source] = signals.advance(self.readings.get(source), source, figures, now_ns)

    async def poll(self) -> None:
        """Read ``/v1/loads`` and compare counters until cancelled."""
        compared = 0.0
        while True:
            tapped = self.signal(time.monotonic_ns()).source is SignalSource.WIRE_TAP
            uses_tap = SignalSource.WIRE_TAP in self.policy.allowed_signals
            if SignalSource.LOADS in self.policy.allowed_signals:
                figures = await self.reader.loads()
                if figures.running is not None:
                    self.note_figures(SignalSource.LOADS, figures, time.monotonic_ns())
            period = 5.0 if self.verification.verified else 1.0
            if uses_tap and time.monotonic() - compared >= period and await self.compare():
                compared = time.monotonic()
            await asyncio.sleep(1.0 if tapped else 0.2 if uses_tap else 0.05)

    async def compare(self) -> bool:
        """One comparison of the tap's and the engine's counts; False when it was not quiet."""
        before = self._quiet()
        if before is None:
            return False
        figures = await self.reader.metrics()
        if figures.requests is None:
            self.verification = Verification()
            return True
        self.note_figures(SignalSource.METRICS, figures, time.monotonic_ns())
        await asyncio.sleep(_BEAT_SECONDS)
        health = self.book.health
        still = self.book.requests_total == before and (figures.at_arrival or not self.book.live)
        if health is None or not still:
            return False
        tap = sum(n for path, n in health.counts.items() if generates("POST", path))
        self.verification = self.verification.compare(
            sum(figures.requests.values()),
            tap,
            self.reader.scrapes,
            health.counts.get("/metrics", 0),
            time.monotonic_ns(),
        )
        metrics.VERIFIED.labels(self.pod.name).set(bool(self.verification.verified))
        if self.verification.missed > 0:
            metrics.MISSED_REQUESTS.labels(self.pod.name).inc(self.verification.missed)
        return True

    def _quiet(self) -> int | None:
        """Requests counted so far, when none has just arrived and every arrival is settled."""
        newest = max((r.arrived_ns for r in self.book.live.values()), default=0)
        if self.book.health is None or time.monotonic_ns() - newest < _QUIET_NS:
            return None
        return self.book.requests_total

    async def snapshots(self) -> None:
        """Read the load snapshot every 20 ms while the scheduler's pid is known."""
        while True:
            if self.snapshot is not None:
                figures = self.snapshot.read()
                if figures.running is not None:
                    self.note_figures(SignalSource.LOAD_SNAPSHOT, figures, time.monotonic_ns())
            await asyncio.sleep(0.02 if self.snapshot is not None else 1.0)

    async def run(self) -> None:
        """Read every polled source until cancelled."""
        tasks = [asyncio.create_task(self.poll()), asyncio.create_task(self.snapshots())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
