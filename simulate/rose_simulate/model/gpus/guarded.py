"""The guard's shell on virtual time: gathers what production gathers, carries out its orders.

Every decision is production's: ``telemetry.book`` and ``telemetry.signal`` make the signal,
``guard.regime`` and ``guard.experience`` what is learned, ``guard.gate.judge`` the verdict,
``guard.slot.decide`` the orders. Here are only their delays. Production steps at every
heartbeat and every event. Here a step that could not change anything is left out: the gate is open
and idle, its permit extended for ever; or it is closed for requests under way, its engine held, and
idle gaps alone are lent. Whether that is still so is looked at with each event, and every 100 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rose_core.guard.budget import BUDGET_CAUSE
from rose_core.guard.certificate import CertificateCount, TtftCertificate
from rose_core.guard.experience import Experience
from rose_core.guard.gate import GateLimits, GateVerdict, ReplicaFacts, gaps_only, judge
from rose_core.guard.ladder import LadderLimits, SlotAction, SlotOrder
from rose_core.guard.reasons import GateReason
from rose_core.guard.regime import Gaps
from rose_core.guard.slack import LatencyObjective
from rose_core.guard.slot import EngineSeen, SlotMachine, SlotSeen, decide
from rose_core.identity import PodUid
from rose_core.telemetry.book import Book, FinishedRequest
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import Arrived, Ended, EndKind, FirstToken, Health, Sized
from rose_core.telemetry.signal import Reading, ServingSignal, SignalLimits, advance, merge
from rose_core.wire.host import EngineState
from rose_core.wire.sync import SignalSource
from rose_simulate.model.clock import MILLISECOND, SECOND, Event, VirtualClock
from rose_simulate.model.gpus.device import SharedGpus
from rose_simulate.model.gpus.gates import ReplicaGate, ServingRequest, SimulatedHost, Timings
from rose_simulate.model.scenarios.machines import NodePoolState

BYTES_PER_TOKEN = 4
_WAITING_NS = 100 * MILLISECOND
_ALWAYS_NS = 10**18  # an open and idle gate is not looked at until something happens
_REPLICA = PodUid("")  # one guard has one replica
_PATH = "/generate"
_TAP = (SignalSource.WIRE_TAP,)
_POLLED = (SignalSource.LOADS,)


class GuardedGate(ReplicaGate):
    """``ours``, or ``polled`` when it may not use the tap.

    Attributes:
        certifies: an empty replica is lent only under a certificate; False = it always was, which
            is what a benchmark compares with.
        certificate: the last one.
    """

    def __init__(
        self,
        clock: VirtualClock,
        device: SharedGpus,
        host: SimulatedHost,
        changed: Callable[[bool], None],
        *,
        name: str,
        timings: Timings,
        objective: LatencyObjective,
        pool: Callable[[], NodePoolState],
        tapped: bool,
        percentile: int,
    ) -> None:
        super().__init__(clock, device, host, changed)
        self._timings, self._goals, self._tapped = timings, objective, tapped
        self._name, self._percentile, self._pool = name, percentile, pool
        self._gate, self._ladder = GateLimits(), LadderLimits()
        # Its heartbeats come on while nothing is looked at here, so the tap is believed.
        self._limits = SignalLimits(tap_stale_ns=_ALWAYS_NS)
        self._wake: Event | None = None
        self._polling = False
        self.verdicts: dict[GateReason, int] = {}
        self.certifies = tapped
        self.certificate: TtftCertificate | None = None
        self._begin()

    def _begin(self) -> None:
        """The guard has started, and has seen nothing."""
        now = self.clock.now_ns
        shared = self._pool()
        self._judged = self._goals  # with the margin that was learned
        self._experience = Experience(now, lessons=shared.lessons)
        self._budget, self._guards = shared.budget, shared.guards
        self._guards[self._name] = self.step
        self._gaps = Gaps(now, reopen_ns=self._gate.reopen_ns, window_ns=self._gate.regime_ns)
        self._book = Book(now)
        self._reading: Reading | None = None
        self._machine = SlotMachine()
        self._chunk_divisor = 1
        self._held = self._holding = self._rests = False
        self._requests: dict[int, ServingRequest] = {}
        self._dead_until_ns = 0

    # --- what it hears

    def on_arrival(self, request: ServingRequest) -> None:
        """Pass it on to the guard ``tap_s`` later."""
        self._requests[request.number] = request
        self._after_tap(self._note_arrival, request)

    def _after_tap(self, note: Callable[[ServingRequest], None], request: ServingRequest) -> None:
        """The tap tells it, unless the guard that was to hear it is gone by then."""
        book = self._book

        def deliver() -> None:
            if book is self._book:
                note(request)

        if self._tapped:
            self.clock.after(self._timings.tap_s, deliver)

    def _note_arrival(self, request: ServingRequest) -> None:
        now = self.clock.now_ns
        number = request.number
        self._book.apply(Arrived(_REPLICA, number, now, _PATH), now)
        self._book.apply(Sized(_REPLICA, number, request.prompt * BYTES_PER_TOKEN), now)
        self._gaps.note(busy=True, now_ns=now)
        self._experience.begin(number, now)
        self._experience.note_size(number, request.prompt * BYTES_PER_TOKEN, now)
        self.step()

    def on_first_token(self, request: ServingRequest) -> None:
        """Pass it on to the guard ``tap_s`` later."""
        self._after_tap(self._note_first, request)

    def _note_first(self, request: ServingRequest) -> None:
        now = self.clock.now_ns
        self._book.apply(FirstToken(_REPLICA, request.number, now), now)
        self._experience.note_first_token(request.number, now)
        self.step()

    def on_end(self, request: ServingRequest) -> None:
        """Pass it on to the guard ``tap_s`` later."""
        self._requests.pop(request.number, None)
        self._after_tap(self._note_end, request)

    def _note_end(self, request: ServingRequest) -> None:
        now = self.clock.now_ns
        event = Ended(_REPLICA, request.number, now, request.output, 200, EndKind.COMPLETE)
        done = self._book.apply(event, now)
        self._gaps.note(busy=bool(self._book.live), now_ns=now)
        if done is not None:
            self._take(done, now)
        self.step()

    def _take(self, done: FinishedRequest, now: int) -> None:
        met = self._experience.learn(done, self._goals, len(self._book.live))
        if not met.used or not self._budget.spend(met, self._percentile, now):
            return
        if self._budget.trip(BUDGET_CAUSE, now):
            for look in self._guards.values():
                self.clock.after(0.0, look)

    def poll(self) -> None:
        """Read ``/v1/loads``: a request shows there only after its first token."""
        serving = self.device.serving
        assert serving is not None  # noqa: S101  # every device serves
        self._polling = True
        if not self.host.off:
            serving.settle()
            figures = Figures(len(serving.running), 0, activity=(serving.prefilled, serving.tokens))
            now = self.clock.now_ns
            self._reading = advance(self._reading, SignalSource.LOADS, figures, now)
            self.step()
        self.clock.after(self._timings.poll_s, self.poll)

    # --- what happens to it

    def lend(self, granted: bool) -> None:
        """The grant has come, or is gone."""
        self.granted = granted
        if not self._tapped and not self._polling:
            self.poll()
        self.step()

    def on_engine_ready(self) -> None:
        """The host lists an engine that serves."""
        self._held = self._holding = False
        self.step()

    def crash(self) -> None:
        """The engine is gone from the host's list."""
        self.device.forbid()
        self.host.stop()
        self.step()

    def on_guard_death(self, seconds: float) -> None:
        """The permit lapses by itself; nothing is decided until the guard is back."""
        dead_until_ns = self.clock.now_ns + round(seconds * SECOND)
        self._dead_until_ns = max(self._dead_until_ns, dead_until_ns)
        permit = self._ladder.permit_ns / SECOND
        self.clock.after(permit, self.shut)  # the permit lapses
        self.clock.after(seconds, self.step)

    def on_node_death(self) -> None:
        """Nothing is decided, and nothing of what it hears is told, until the node is back."""
        super().on_node_death()
        self._begin()
        self._dead_until_ns = _ALWAYS_NS

    def on_node_return(self) -> None:
        """A fresh guard, beside a serving engine that has no request."""
        self.host.off = False
        self._begin()
        self.step()

    # --- one step, as the agent's loop makes it

    def signal(self, now: int) -> ServingSignal:
        """Every source merged, by production's rules."""
        if not self._tapped:
            readings = (self._reading,) if self._reading else ()
            return merge(None, None, readings, allowed=_POLLED, limits=self._limits, now_ns=now)
        live = self._book.live
        # The tap's heartbeat. ``blind_ns`` of a fresh book lies before the start.
        self._book.apply(Health(_REPLICA, now, "", -(10**12), False, len(live), {}, 0), now)
        self._book.blind_ns = -(10**12)
        for number, known in live.items():
            sequence = self._requests[number].sequence if number in self._requests else None
            if known.first_ns and sequence is not None:
                # What the book makes of ``Progress``, which is most of a busy replica's events.
                known.last_ns, known.tokens = now, sequence.produced
        return merge(self._book, True, (), allowed=_TAP, limits=self._limits, now_ns=now)

    def step(self) -> None:
        """Judge, decide, carry out, and say when to look again."""
        now = self.clock.now_ns
        if now < self._dead_until_ns:
            return
        if self.device.serving is not None and self._book.live:
            self.device.serving.settle()
        if self._rests and self._still(now):
            self._note(GateReason.SERVING_BUSY)
            self._wake_at(now + _WAITING_NS)
            return
        verdict = judge(self._facts(now), self._gate, now)
        self._note(verdict.reason)
        state = self.host.state
        engine = EngineSeen(state, 1, held=self._held) if state is not None else None
        seen = SlotSeen(self.granted, 1, verdict, engine, host_alive=True, heartbeat_ns=0)
        self._machine, actions = decide(self._machine, seen, self._ladder, now)
        for action in actions:
            self._carry_out(action)
        is_open = verdict.open and self.granted and engine is not None and state == "Serving"
        until_ns = verdict.until_ns or _ALWAYS_NS
        self._experience.open_time.note(until_ns if is_open and not self._held else 0, now)
        self.set_open(is_open)
        self._rests = verdict.reason is GateReason.SERVING_BUSY and self._held
        self._schedule(verdict, now)

    def _note(self, reason: GateReason) -> None:
        self.verdicts[reason] = self.verdicts.get(reason, 0) + 1

    def _still(self, now: int) -> bool:
        """Whether the last step, which found requests under way and its engine held, stands."""
        return (
            self._held
            and self.granted
            and bool(self._book.live)
            and self.host.state is EngineState.SERVING
            and not self._budget.breaker.open(now)
            and gaps_only(self._goals, self._gaps.share(now), self._gate)
        )

    def _facts(self, now: int) -> ReplicaFacts:
        margin = self._experience.margin.value
        if self._judged.margin != margin:
            self._judged = replace(self._goals, margin=margin)
        return ReplicaFacts(
            signal=self.signal(now),
            breaker_open=self._budget.breaker.open(now),
            idle_share=self._gaps.share(now) if self._tapped else 1.0,
            cool_down_ns=self._gaps.cool_down_ns if self._tapped else None,
            objective=self._judged,
            predictor=self._experience.predictor,
            certificate=self._certificate(),
        )

    @property
    def slowdown(self) -> float:
        """As learned from requests that met rollouts."""
        return self._experience.slowdown

    @property
    def certified(self) -> CertificateCount:
        """Requests that met an open gate under a certificate."""
        return self._experience.lessons.certified

    def _certificate(self) -> TtftCertificate | None:
        # Polls show no request before its first token, so nothing is learned of the next one.
        if self.certifies:
            self.certificate = self._experience.certificate(self._goals, self._percentile)
        return self.certificate

    def _carry_out(self, action: SlotAction) -> None:
        if action.order is SlotOrder.ENSURE:
            self.host.ensure()
        elif action.order is SlotOrder.STOP:
            self.device.forbid()
            self.host.stop()
            self.clock.after(self._timings.tick_s, self.step)
        elif action.order is SlotOrder.CLOSE:
            had_turns = self.device.rollout is not None and self.device.rollout.busy
            late = self.device.forbid(self._timings.close_s)
            if late is not None and self._book.live:
                stop_s = self._timings.tap_s + late
                self._experience.note_stop(stop_s, self._chunk_divisor, had_turns=had_turns)
        elif action.order is SlotOrder.HOLD and not self._holding:
            self._holding = True
            self.clock.after(self._timings.freeze_s, self._confirm_hold)
        elif action.order is SlotOrder.LET_GO:
            self._holding = False
            self.clock.after(self._timings.open_s, self._confirm_let_go)
        elif action.order is SlotOrder.EXTEND and not self._held and self.host.state == "Serving":
            self._chunk_divisor = action.chunk_divisor
            self.device.allow(action.chunk_divisor)

    def _confirm_hold(self) -> None:
        if self._holding:
            self._held = True
            self.device.forbid()
            self.step()

    def _confirm_let_go(self) -> None:
        if not self._holding:
            self._held = False
            self.step()

    def _schedule(self, verdict: GateVerdict, now: int) -> None:
        idle = verdict.reason is GateReason.IDLE
        if idle or (not self.granted and self.host.state is None):
            self._wake_at(None)
            return
        tick = round(self._timings.tick_s * SECOND)
        wait = _WAITING_NS if verdict.reason is GateReason.SERVING_BUSY else tick
        if verdict.again_ns > now:
            wait = min(wait, verdict.again_ns - now)
        self._wake_at(now + wait)

    def _wake_at(self, time_ns: int | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None if time_ns is None else self.clock.at(time_ns, self.step)
