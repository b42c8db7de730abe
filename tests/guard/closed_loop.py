"""A replica that is never idle, in closed loop with the gate: millisecond by millisecond.

A serving engine (prefill first, then whole decode steps of its batch) and a rollout engine share a
device; beside each other both are ``slowdown`` times slower. A pause lets the rollout iteration
under way end, any other closing stops it after ``stop_ms``. The same arrivals can be met under a
fixed share, which is what an offline oracle searches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rose_core.guard.experience import Experience
from rose_core.guard.gate import GateLimits, GateVerdict, ReplicaFacts, judge
from rose_core.guard.predictor import Predictor
from rose_core.guard.reasons import GateReason
from rose_core.guard.slack import LatencyObjective
from rose_core.telemetry.book import FinishedRequest, LiveRequest
from rose_core.telemetry.events import EndKind
from rose_core.telemetry.signal import ServingSignal
from rose_core.wire.sync import SignalSource
from tests.guard.worlds import MS, NOW, facts

_DEFAULT = GateLimits()
_LEAD_MS = 3  # before a period begins


@dataclass(frozen=True)
class Machine:
    """Times of the two engines alone, milliseconds.

    Attributes:
        outputs: shortest and longest answer, tokens.
        gap_ms: mean time between arrivals.
        noise: every step takes up to this share more or less.
        iteration_ms: of the rollout engine, which makes ``streams`` tokens in it.
        open_ms: from the open gate to the rollout engine at work, after a pause.
        stop_ms: from a closed gate to a rollout engine that stands still.
        again_ms: from the open gate to the rollout engine at work, after it stood still.
        slow: (from, to, factor): the device is that much slower then, for everybody.
    """

    prefill_ms: float = 22.0
    step_ms: float = 8.5
    request_ms: float = 1.0
    outputs: tuple[int, int] = (64, 96)
    gap_ms: float = 340.0
    noise: float = 0.1
    slowdown: float = 2.2
    iteration_ms: float = 15.6
    streams: int = 4
    open_ms: float = 3.0
    stop_ms: float = 5.0
    again_ms: float = 14.0
    slow: tuple[tuple[int, int, float], ...] = ()

    def saturated(self) -> float:
        """Requests per second with sixteen streams under way."""
        tokens = sum(self.outputs) / 2
        step_ms = self.step_ms + 16 * self.request_ms
        return 1000 / (self.prefill_ms + tokens * step_ms / 16)

    def loaded(self, share: float) -> Machine:
        """The same with a share of the saturated rate."""
        return replace(self, gap_ms=1000 / (share * self.saturated()))

    def pace(self, now_ms: int) -> float:
        """Speed of the device."""
        return next((1 / by for start, end, by in self.slow if start <= now_ms < end), 1.0)


@dataclass
class Asked:
    """One request on its way."""

    number: int
    at_ms: int
    output: int
    first_ms: int = 0
    last_ms: int = 0
    tokens: int = 0
    live: LiveRequest | None = None

    @property
    def ttft_ms(self) -> float:
        """To the first token."""
        return self.first_ms - self.at_ms

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first."""
        return (self.last_ms - self.first_ms) / max(1, self.tokens - 1)


Gate = Callable[["World"], tuple[bool, bool]]
"""(open, merely paused) of this millisecond."""
Ended = Callable[[Asked, int], None]
"""A request that is over, and how many are still under way."""


@dataclass
class World:
    """One run; ``harvested`` counts rollout tokens of the measured part."""

    machine: Machine
    seed: int
    seconds: int
    now_ms: int = 0
    waiting: list[Asked] = field(default_factory=list)
    prefilling: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    done: list[Asked] = field(default_factory=list)
    harvested: float = 0.0
    opened_ms: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._noise = random.Random(-self.seed)
        self._left_ms = 0.0
        self._iteration = 0.0
        self._ready_ms = 0
        self._stopping_ms = 0
        self._still = False
        self._was_open = False
        self._arrivals = self._schedule()

    def _schedule(self) -> list[Asked]:
        at = 0.0
        found: list[Asked] = []
        while at < 1000 * self.seconds:
            found.append(Asked(len(found), int(at), self._draw.randint(*self.machine.outputs)))
            at += self.machine.gap_ms * self._draw.uniform(0.6, 1.4)
        return found

    @property
    def under_way(self) -> list[Asked]:
        """Every request that has come and is not over."""
        return [*self.waiting, *self.prefilling, *self.running]

    def run(self, gate: Gate, ended: Ended | None = None) -> World:
        """To the end."""
        pending = list(self._arrivals)
        while self.now_ms < 1000 * self.seconds:
            while pending and pending[0].at_ms <= self.now_ms:
                self.waiting.append(pending.pop(0))
            rolls = self._rolls(*gate(self))
            self.now_ms += 1
            speed = 1 / self.machine.slowdown if rolls and self.under_way else 1.0
            speed *= self.machine.pace(self.now_ms)
            if rolls:
                self._roll(speed)
            self._serve(speed, ended)
        return self

    def _rolls(self, is_open: bool, paused: bool) -> bool:
        """Whether the rollout engine computes in this millisecond."""
        machine = self.machine
        if is_open and not self._was_open:
            late = machine.again_ms if self._still else machine.open_ms
            self._ready_ms = self.now_ms + int(late)
        if self._was_open and not is_open:
            self._stopping_ms = self.now_ms + int(machine.stop_ms)
        self._was_open = is_open
        self.opened_ms += is_open
        if is_open:
            self._still = False
            return self.now_ms >= self._ready_ms
        if not paused and self.now_ms >= self._stopping_ms:
            self._still = True
        return not self._still and self._iteration > 0

    def _roll(self, speed: float) -> None:
        self._iteration += speed
        if self._iteration >= self.machine.iteration_ms:
            self._iteration = 0.0
            self.harvested += self.machine.streams

    def _serve(self, speed: float, ended: Ended | None) -> None:
        if self._left_ms <= 0:
            self._choose()
        if not (self.prefilling or self.running):
            return
        self._left_ms -= speed
        if self._left_ms > 0:
            return
        if self.prefilling:
            for asked in self.prefilling:
                asked.first_ms = asked.last_ms = self.now_ms
                asked.tokens = 1
            self.running += self.prefilling
            self.prefilling = []
            return
        for asked in self.running:
            asked.tokens, asked.last_ms = asked.tokens + 1, self.now_ms
        for asked in [a for a in self.running if a.tokens >= a.output]:
            self.running.remove(asked)
            self.done.append(asked)
            if ended is not None:
                ended(asked, len(self.under_way))

    def _choose(self) -> None:
        machine, spread = self.machine, self.machine.noise
        if self.waiting:
            self.prefilling, self.waiting = self.waiting, []
            cost = machine.prefill_ms * len(self.prefilling)
        else:
            cost = machine.step_ms + machine.request_ms * len(self.running)
        self._left_ms = cost * self._noise.uniform(1 - spread, 1 + spread)


def fixed(share: float, period_ms: int = 100) -> Gate:
    """A share of each period, whatever happens."""
    return lambda world: (world.now_ms % period_ms < share * period_ms, True)


class Guarded:
    """The production's rules on the world: what is learned, and the verdict.

    Args:
        goals: of the pool.
        predictor: to begin with.
        size: of every request.
        report_ms: how often the tap tells tokens and ends; arrivals and first tokens it tells at
            once, and the others with them. 0 = everything is known at once.
    """

    def __init__(
        self, goals: LatencyObjective, predictor: Predictor, size: int = 350, report_ms: int = 0
    ) -> None:
        self.goals, self.size = goals, size
        self._every_ms, self._reported_ns = report_ms, 0
        self._news: set[tuple[int, bool]] = set()
        self._told: tuple[LiveRequest, ...] = ()
        self.experience = Experience(NOW, predictor)
        self.reasons: dict[str, int] = {}

    def gate(self, world: World) -> tuple[bool, bool]:
        """One look."""
        now = NOW + world.now_ms * MS
        requests = self._live_requests(world)
        if not world.under_way:
            self.experience.open_time.note(now + 10**12, now)
            return True, False
        verdict = judge(self._facts(requests), _DEFAULT, now)
        word = f"{verdict.reason} {'open' if verdict.open else 'closed'}"
        self.reasons[word] = self.reasons.get(word, 0) + 1
        self.experience.open_time.note(self._until(verdict), now)
        return verdict.open, verdict.reason is GateReason.SLACK

    def _live_requests(self, world: World) -> tuple[LiveRequest, ...]:
        if not self._every_ms:
            self._reported_ns = NOW + world.now_ms * MS
            return tuple(self._live(asked) for asked in world.under_way)
        news = {(asked.number, asked.first_ms > 0) for asked in world.under_way}
        beat = (world.now_ms + _LEAD_MS) % self._every_ms == 0
        if beat or not news <= self._news:
            self._news = news
            self._told = tuple(self._live(asked) for asked in world.under_way)
        if beat:
            self._reported_ns = NOW + world.now_ms * MS
        return self._told

    @staticmethod
    def _until(verdict: GateVerdict) -> int:
        return (verdict.until_ns or NOW * 10) if verdict.open else 0

    def _facts(self, requests: tuple[LiveRequest, ...]) -> ReplicaFacts:
        margin = self.experience.margin.value
        goals = LatencyObjective(
            self.goals.ttft_s, self.goals.tpot_s, self.goals.max_increase, margin
        )
        predictor = self.experience.predictor
        signal = ServingSignal(
            SignalSource.WIRE_TAP, len(requests), requests, tokens_until_ns=self._reported_ns
        )
        return facts(signal, idle_share=0.0, objective=goals, predictor=predictor)

    def _live(self, asked: Asked) -> LiveRequest:
        if asked.live is None:
            at = NOW + asked.at_ms * MS
            asked.live = LiveRequest(asked.number, at, size=self.size)
            self.experience.begin(asked.number, at)
        live = asked.live
        if asked.first_ms and not live.first_ns:
            live.first_ns = NOW + asked.first_ms * MS
            self.experience.note_first_token(asked.number, live.first_ns)
        live.tokens, live.last_ns = asked.tokens, NOW + asked.last_ms * MS
        return live

    def ended(self, asked: Asked, others: int) -> None:
        """A request is over."""
        at, first, last = (NOW + ms * MS for ms in (asked.at_ms, asked.first_ms, asked.last_ms))
        how = EndKind.COMPLETE
        done = FinishedRequest(
            asked.number, at, first, last, self.size, asked.tokens, 200, how, "/"
        )
        self.experience.learn(done, self.goals, others)
