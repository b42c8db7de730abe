"""One serving replica as the guard knows it: the tap's book, polled figures, outcomes of requests.

It only gathers. Next step: ``facts`` is what ``rose_core.guard.gate`` judges; ``loop`` makes
and forgets replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace

from rose_agent.devices.watch import ReplicaGpus
from rose_agent.guard import metrics
from rose_agent.guard.replicas.outcomes import Outcomes
from rose_agent.pods.model import ServingPod
from rose_agent.signals import verify
from rose_agent.signals.reader import Reader, Readers
from rose_agent.tap.frames import TapWatch
from rose_core.devices.memory import LEAST_ENGINE_BYTES
from rose_core.guard.compute import ComputeWindow
from rose_core.guard.following import LeaderLease
from rose_core.guard.gate import GateLimits, ReplicaFacts
from rose_core.guard.regime import Gaps
from rose_core.telemetry import signal as signals
from rose_core.telemetry.book import Book
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import Counted, Progress, TapEvent
from rose_core.telemetry.signal import Doubt, Reading, ServingSignal, SignalLimits
from rose_core.telemetry.verify import SignalVerification
from rose_core.wire.sync import PoolPolicy, SignalSource

_LASTING_NS = 5_000_000_000
_IDLY_SECONDS = 1.0  # between two readings of figures by which nobody goes
_RARELY_SECONDS = 5.0  # the report tells KV use that is less than twice as old
_FIRSTS_NS = 5_000_000_000  # of a habit: as long as that of being never idle
_SILENT_NS = 1_000_000_000  # several heartbeats
# Usable idle shares between which tokens become interesting, well before a replica is never idle.
_HARDLY_IDLE, _IDLE_ENOUGH = 0.2, 0.4


@dataclass
class GuardedReplica:
    """One replica.

    Attributes:
        gone: a serving process has exited and no new one has settled.
        granted: a slot is granted beside this replica: else nothing has to be stopped for it.
        lent: a rollout engine serves there; before that there is nothing to withhold and nothing
            to compare.
        gaps: idle time that could be used lately.
        view: its GPUs, as last looked at; at ``looked_ns``, 0 = never.
        shown: whether the metrics say that the state is known.
        closely: lending may be paced by tokens, so the tap reports them sooner; since
            ``closely_ns``, 0 = it does not.
        prefill_shut_ns: when the gate was last found shut for a request without a first token.
        at_once: the tap was asked to tell arrivals as they happen; asked last at ``asked_ns``.
        compute: what rollouts have had of its GPUs lately, against the owner's limit.
    """

    pod: ServingPod
    policy: PoolPolicy
    outcomes: Outcomes
    limits: SignalLimits
    book: Book
    gaps: Gaps
    reader: Reader
    readings: dict[SignalSource, Reading] = field(default_factory=dict)
    verification: SignalVerification = field(default_factory=SignalVerification)
    gone: bool = False
    gone_since_ns: int = 0
    exited: set[int] = field(default_factory=set)
    settled: bool = True
    source: SignalSource | None = None
    known_ns: int = 0
    granted: bool = False
    lent: bool = False
    view: ReplicaGpus | None = None
    looked_ns: int = 0
    shown: bool | None = None
    closely: bool = False
    closely_ns: int = 0
    prefill_shut_ns: int = 0
    at_once: bool = False
    asked_ns: int = 0
    compute: ComputeWindow = field(default_factory=ComputeWindow)

    @classmethod
    def create(
        cls,
        pod: ServingPod,
        policy: PoolPolicy,
        *,
        outcomes: Outcomes,
        gate: GateLimits,
        readers: Readers,
    ) -> GuardedReplica:
        """Begin to follow a replica that has just been found; nothing is read yet.

        Args:
            pod: its pod.
            policy: of its pool.
            outcomes: where its finished requests are learnt from.
            gate: periods over which gaps between requests are measured.
            readers: give the reader of its engine's metrics.
        """
        reader = readers.of(pod, policy.engine)
        now_ns = time.monotonic_ns()
        gaps = Gaps(now_ns, reopen_ns=gate.reopen_ns, window_ns=gate.regime_ns)
        return cls(pod, policy, outcomes, SignalLimits(), Book(now_ns), gaps, reader)

    def update(self, pod: ServingPod, policy: PoolPolicy) -> None:
        """Take the present state of the pod and the policy of its pool."""
        moved = pod.address != self.pod.address or policy.engine != self.policy.engine
        if moved:
            self.verification = SignalVerification()
        if moved or pod.pids != self.pod.pids:
            self.reader.aim(pod, policy.engine)
        self.pod, self.policy = pod, policy

    def watch(self, *, followed: bool) -> TapWatch:
        """What the tap should follow: closely where lending may be paced by tokens.

        Args:
            followed: somebody goes by the gate, and a request may have to close it; else nothing
                has to be told before a heartbeat.
        """
        now_ns = time.monotonic_ns()
        pod, given = self.pod, self.outcomes.objective(self.policy).given
        paced = followed and self.granted and given
        border = _IDLE_ENOUGH if self.closely else _HARDLY_IDLE
        self.closely = paced and self.gaps.share(now_ns) < border
        self.closely_ns = (self.closely_ns or now_ns) if self.closely else 0
        # A first token opens a gate that is shut for it. Where none is, all are deep in their TTFT.
        shut_ns = max(self.prefill_shut_ns, self.closely_ns)
        if followed is not self.at_once:
            self.at_once, self.asked_ns = followed, now_ns
        return TapWatch(
            *(pod.uid, pod.pid, pod.port),
            interfaces=pod.interfaces,
            closely=self.closely,
            firsts=self.closely and now_ns - shut_ns < _FIRSTS_NS,
            at_once=followed,
        )

    @property
    def arrivals_wait(self) -> bool:
        """The tap holds arrivals back, or may: it has not been heard since it was asked last."""
        health = self.book.health
        return health is not None and (not health.at_once or health.time_ns < self.asked_ns)

    def note_known(self, *, known: bool) -> None:
        """Show in the metrics whether the state is known."""
        if known is not self.shown:
            self.shown = known
            metrics.SIGNAL_KNOWN.labels(self.pod.name).set(known)

    def note_compute(self, until_ns: int, now_ns: int) -> None:
        """A permit beside serving that is awake is open from now until then; 0 = none is."""
        if self.policy.max_compute_percent:
            self.compute = self._limited().opened(until_ns, now_ns)
            metrics.COMPUTE_SHARE.labels(self.pod.name).set(self.compute.share(now_ns))

    def _limited(self) -> ComputeWindow:
        percent = self.policy.max_compute_percent
        same = self.compute.percent == percent
        return self.compute if same else replace(self.compute, percent=percent)

    @property
    def full(self) -> bool:
        """It has no memory that an engine could use, and its owner allows it to sleep instead."""
        return (
            self.policy.sleep is not None
            and self.view is not None
            and self.view.lendable.bytes is not None
            and self.view.lendable.bytes < LEAST_ENGINE_BYTES
        )

    @property
    def unplaced(self) -> bool:
        """It is one of several pods, as controller or engine say, and nobody says which."""
        size = max(self.pod.group_size, self.reader.machines or 1)
        return size > (self.pod.place.size if self.pod.place is not None else 1)

    def signal(self, now_ns: int) -> ServingSignal:
        """What all sources together say about the requests under way."""
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
        """The source for the operator, which does not learn of doubts that last less than 5 s."""
        fresh = self.known_ns and now_ns - self.known_ns < _LASTING_NS
        return self.source if fresh else None

    def busy_ns(self, source: SignalSource | None, now_ns: int) -> int:
        """Total time with a request under way, as this source counts; 0 if it never answered."""
        if source is SignalSource.WIRE_TAP:
            return self.book.busy_ns(now_ns)
        reading = self.readings.get(source) if source is not None else None
        return reading.worked_ns if reading is not None else 0

    def facts(
        self,
        now_ns: int,
        *,
        stop_pressed: bool,
        whole_chunks: bool = False,
        followed: bool = False,
        following: LeaderLease | None = None,
    ) -> ReplicaFacts:
        """What the gate needs to know.

        Args:
            now_ns: the time.
            stop_pressed: nothing may be lent on this node.
            whole_chunks: an engine beside it cannot shorten its prefill chunks.
            followed: somebody goes by the gate, so what is told late says nothing.
            following: words of the guard whose gate it follows; None = it follows none.
        """
        uses_tap = SignalSource.WIRE_TAP in self.policy.allowed_signals
        signal = self.signal(now_ns)
        if followed and uses_tap and self.arrivals_wait and signal.doubt is None:
            signal = signals.unknown(Doubt.NO_SIGNAL)
        return ReplicaFacts(
            signal=signal,
            stop_requested=stop_pressed or self.pod.stopped,
            lending=self.policy.mode == "Lend",
            gone=self.gone,
            ready=self.pod.ready,
            settled=self.settled,
            memory_pressure=self.view is not None and self.view.budget.pressure,
            device_unfit=self.view is not None and bool(self.view.refusal),
            breaker_open=self.outcomes.pool.breaker.open(now_ns),
            # A follower's cycles are its leader's, where requests are counted: it closes in them.
            withheld=self.outcomes.is_withheld(self.policy, now_ns, lent=self.lent)
            and following is None,
            idle_share=self.gaps.share(now_ns),
            cool_down_ns=self.gaps.cool_down_ns,
            compute=self._limited(),
            objective=self.outcomes.objective(self.policy),
            predictor=self.outcomes.predictor,
            following=following,
            certificate=self.outcomes.certificate(self.policy, whole=whole_chunks),
        )

    def take(self, event: TapEvent, now_ns: int) -> None:
        """Apply one event of the tap."""
        at_ns = self.book.moment(event, now_ns)
        done = self.book.apply(event, at_ns)
        if isinstance(event, Progress | Counted):
            return  # nobody has come or gone
        self.gaps.note(busy=bool(self.book.live), now_ns=at_ns)
        self.outcomes.observe(event, at_ns)
        if done is not None:
            others = len(self.book.live)
            self.outcomes.record(done, self.policy, lent=self.lent, others=others)

    def forget(self, now_ns: int) -> None:
        """The tap is gone: nothing is known any more."""
        self.book.forget(now_ns)
        self.gaps.note(busy=False, now_ns=now_ns)
        self.outcomes.forget()

    # --- serving processes that come and go

    def note_gone(self, pid: int) -> None:
        """A serving process has exited (its pid), or the container was restarted (0)."""
        self.gone, self.gone_since_ns = True, time.monotonic_ns()
        self.exited |= {pid} if pid else set()

    def check_return(self, settle_seconds: float) -> None:
        """Take serving for back once new processes have been Ready for the settling time."""
        waited_s = (time.monotonic_ns() - self.gone_since_ns) / 1e9
        fresh = not self.exited & set(self.pod.pids)
        if self.gone and self.pod.ready and fresh and waited_s >= settle_seconds:
            self.gone, self.exited = False, set()

    # --- polled sources

    def note_figures(self, source: SignalSource, figures: Figures, now_ns: int) -> None:
        """Add one answer of a polled source, which came at ``now_ns`` of CLOCK_MONOTONIC."""
        self.readings[source] = signals.advance(self.readings.get(source), source, figures, now_ns)

    @property
    def served_tokens(self) -> tuple[int, int] | None:
        """Tokens of prompts and of answers by the engine's last page; None = it does not say."""
        page = self.readings.get(SignalSource.METRICS)
        if page is None or page.figures.input_tokens is None or page.figures.output_tokens is None:
            return None
        return page.figures.input_tokens, page.figures.output_tokens

    async def poll(self) -> None:
        """Read ``/v1/loads`` and compare counters until cancelled."""
        compared = asked = 0.0
        while True:
            tapped = self.signal(time.monotonic_ns()).source is SignalSource.WIRE_TAP
            uses_tap = SignalSource.WIRE_TAP in self.policy.allowed_signals
            # A tap that is heard and may be wrong is not outvoted: only its counts are compared.
            idle = uses_tap and not self.verification.verified and self._reads_tap()
            # Whoever sees each request live need not ask the engine whether it has any.
            lives = tapped and self.book.lives(time.monotonic_ns())
            pause = _RARELY_SECONDS if lives else _IDLY_SECONDS if idle else 0.0
            due = time.monotonic() - asked >= pause
            if SignalSource.LOADS in self.policy.allowed_signals and due:
                asked = time.monotonic()
                figures = await self.reader.loads()
                if figures.running is not None:
                    self.note_figures(SignalSource.LOADS, figures, time.monotonic_ns())
            period = 5.0 if self.verification.verified else 1.0
            if uses_tap and time.monotonic() - compared >= period and await self.compare():
                compared = time.monotonic()
            settled = tapped and not self.book.outstanding
            # Where nothing is lent, figures matter only where they stand in for the tap.
            rare = settled or (uses_tap and not self.granted and self._reads_tap())
            await asyncio.sleep(1.0 if rare else 0.2 if uses_tap else 0.05)

    def _reads_tap(self) -> bool:
        """Whether the tap is heard and reads what it sees, verified or not."""
        health, silent_ns = self.book.health, time.monotonic_ns() - self.book.last_seen_ns
        return health is not None and not health.opaque and silent_ns < _SILENT_NS

    async def compare(self) -> bool:
        """One comparison of the tap's and the engine's counts; False when it could not be made."""
        made = await verify.compare(self.reader, self.book, self.verification)
        if made is None:
            return False
        self.verification, figures = made
        if figures is not None:
            self.note_figures(SignalSource.METRICS, figures, time.monotonic_ns())
        metrics.VERIFIED.labels(self.pod.name).set(bool(self.verification.verified))
        if self.verification.missed > 0:
            metrics.MISSED_REQUESTS.labels(self.pod.name).inc(self.verification.missed)
        return True

    async def read_snapshots(self) -> None:
        """Read the load snapshot where there is one; often only where it decides alone."""
        while True:
            figures = self.reader.snapshot()
            if figures.running is not None:
                self.note_figures(SignalSource.LOAD_SNAPSHOT, figures, time.monotonic_ns())
            tapped = self.lasting_source(time.monotonic_ns()) is SignalSource.WIRE_TAP
            self.reader.watch(0.2 if tapped else 0.02)
            await asyncio.sleep(1.0 if figures.running is None else 0.2 if tapped else 0.02)

    async def run(self) -> None:
        """Read every polled source until cancelled."""
        tasks = [asyncio.create_task(self.poll()), asyncio.create_task(self.read_snapshots())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
