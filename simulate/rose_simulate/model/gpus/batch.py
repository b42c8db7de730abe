"""A continuously batching engine on virtual time; serving and rollout engines are both this.

| phase | work | ends |
|---|---|---|
| idle | none | when something is submitted |
| prefill | everything waiting that fits, up to the chunk | all of it has its first token |
| decode | whole steps of the batch | a sequence is complete, or something arrives: the step ends |

Prefill goes first, as in SGLang's default. Equal steps are not simulated one by one: their times
are summed in closed form, and an interruption counts the whole steps done so far. ``speed`` is the
share of the device: 0 frozen, 1 alone, less when co-running; work done is kept across changes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rose_simulate.model.clock import SECOND, Event, VirtualClock
from rose_simulate.model.gpus.kept import KeptKeys, TierReader
from rose_simulate.model.gpus.recomputed import Cause, EngineHistory
from rose_simulate.model.scenarios.costs import ModelCosts, pairs, steps_in, time_of

PREFILL_CHUNK = 8192


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside an engine.

    Attributes:
        session: key of the prefix cache; empty = never cached.
        context: tokens before the first new one.
        left: output tokens still to come.
        uncached: tokens of the context that it had to prefill; ``fetched``: that it got from the
            job's tier instead.
        causes: of ``uncached``, where the job's history is kept.
    """

    session: str
    context: int
    left: int
    on_first: Callable[[], None]
    on_done: Callable[[], None]
    produced: int = 0
    uncached: int = 0
    fetched: int = 0
    reserved: int = 0
    causes: Mapping[Cause, int] = field(default_factory=dict)


class BatchEngine:
    """One engine.

    Args:
        clock: virtual time.
        costs: its times.
        kv_tokens: size of the KV pool; a sequence is admitted when its whole length fits.
        on_busy: called when it begins or ceases to have work.
        quantum: tokens of one prefill chunk, the longest time it cannot be stopped.
        kept: where keys are that other engines made; None = nowhere.
        history: what this and the job's other engines have computed; None = nobody asks.
    """

    def __init__(
        self,
        clock: VirtualClock,
        costs: ModelCosts,
        kv_tokens: int,
        on_busy: Callable[[], None],
        *,
        quantum: int = PREFILL_CHUNK,
        kept: KeptKeys | None = None,
        history: EngineHistory | None = None,
    ) -> None:
        self._clock, self._costs, self._kept = clock, costs, kept
        self._reader = None if kept is None else TierReader(kept)
        self._history = history
        self.kv_tokens, self._on_busy, self.quantum = kv_tokens, on_busy, quantum
        self._divisor = 1
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._cached = self._reserved = self._context = 0
        self.speed = 1.0
        self._steps = 0
        self._first = self._growth = self._total = self._work = 0.0
        self._stretch = 1.0  # by how much attention makes the prefill under way longer
        self._mark_ns = 0
        self._event: Event | None = None
        self.tokens = self.prefilled = 0
        self.busy = False
        self.busy_ns = 0

    # --- questions

    @property
    def live(self) -> int:
        """Requests inside."""
        return len(self.waiting) + len(self.running) + len(self._prefilling)

    @property
    def kv_share(self) -> float:
        """Share of the KV pool under live sequences."""
        return self._reserved / self.kv_tokens if self.kv_tokens else 1.0

    def cached(self, session: str) -> int:
        """Tokens of the session whose keys are here."""
        return self._cache.get(session, 0)

    def residual(self) -> float:
        """Seconds at full speed until it can be stopped: the rest of the step or chunk."""
        self._settle()
        if self._prefilling:
            quantum = self.quantum // self._divisor
            chunk = self._costs.prefill(quantum, 0.0) * self._stretch
            return min(chunk - self._work % chunk, max(0.0, self._total - self._work))
        # Of a step that gives several tokens none can be told from the others: all may be left.
        whole = self._first * self._costs.tokens_per_step
        return max(0.0, whole - self._work) if self.running else 0.0

    # --- orders

    def divide_chunks(self, divisor: int) -> None:
        """Prefill in chunks so much shorter than its own from the next prefill on."""
        self._divisor = divisor

    def submit(self, sequence: Sequence) -> None:
        """Take a request."""
        self._settle()
        self.waiting.append(sequence)
        if self.running and not self._prefilling:
            # The step under way ends, then the newcomer is looked at.
            self._steps = min(self._steps, 1)
            self._plan()
        elif not self._prefilling:
            self._choose()
        self._note_busy()

    def remove(self, sequence: Sequence) -> None:
        """Take a request out; what it has produced stands in it."""
        self._settle()
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence, keep=True)
            self._choose(carry=self._work)
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self._release(sequence, keep=False)
            if not self._prefilling:
                self._choose()
        self._note_busy()

    def clear(self) -> list[Sequence]:
        """The engine is lost with everything in it."""
        self._settle()
        lost = [*self.waiting, *self._prefilling, *self.running]
        for sequence in self.running:
            self._note_made(sequence)
        self.waiting.clear()
        self._prefilling, self.running = [], []
        self._cache.clear()
        self._cached = self._reserved = self._context = 0
        self._choose()
        self._note_busy()
        return lost

    def set_speed(self, speed: float) -> None:
        """Give it another share of the device."""
        if speed != self.speed:
            self._settle()
            self.speed = speed
            self._plan()

    # --- inside

    def _note_busy(self) -> None:
        busy = bool(self.waiting or self.running or self._prefilling)
        if busy != self.busy:
            self.busy = busy
            self._on_busy()

    def settle(self) -> None:
        """Count what has been done up to now."""
        self._settle()

    def _settle(self) -> None:
        now = self._clock.now_ns
        elapsed, self._mark_ns = now - self._mark_ns, now
        if elapsed <= 0:
            return
        if self.waiting or self.running or self._prefilling:
            self.busy_ns += elapsed
        if self.speed <= 0.0 or not (self._prefilling or self._steps):
            return
        self._work += elapsed * self.speed / SECOND
        if not self._prefilling:
            done = min(steps_in(self._first, self._growth, self._work), self._steps - 1)
            if done > 0:
                self._advance(done)

    def _advance(self, steps: int) -> None:
        batch = len(self.running)
        self._work = max(0.0, self._work - time_of(self._first, self._growth, steps))
        self._first += self._growth * steps
        self._steps -= steps
        self._context += steps * batch
        self.tokens += steps * batch
        for sequence in self.running:
            sequence.produced += steps
            sequence.left -= steps

    def _choose(self, carry: float = 0.0) -> None:
        """Begin the next phase."""
        self._work, self._steps = carry, 0
        if not self._prefilling:
            self._admit()
        if self._prefilling:
            self._work = 0.0
            self._total = self._prefill_s() + self._fetch_s()
        elif self.running:
            self._first, self._growth = self._costs.step(len(self.running), self._context)
            self._steps = min([sequence.left for sequence in self.running])
        self._plan()

    def _prefill_s(self) -> float:
        tokens = sum(s.uncached for s in self._prefilling)
        attended = sum(pairs(s.uncached, s.context - s.uncached) for s in self._prefilling)
        whole = self._prefill_of(tokens, attended)
        self._stretch = whole / self._costs.prefill(tokens, 0.0)
        return whole

    def _prefill_of(self, tokens: int, attended: float) -> float:
        """Seconds of a prefill in chunks of the present quantum."""
        alone = self._costs.prefill(tokens, 0.0)
        whole = self._costs.prefill(tokens, attended)
        short = self.quantum // self._divisor
        if self.quantum < PREFILL_CHUNK and tokens > short:
            # Each chunk has its fixed part, and reads all weights, which takes a decode step.
            chunk = self._costs.prefill(short, 0.0) * whole / alone
            whole = tokens / short * max(chunk, self._costs.step(1, 0)[0])
        return whole

    def _fetch_s(self) -> float:
        if self._reader is None:
            return 0.0
        return sum(self._reader.seconds(one.fetched) for one in self._prefilling)

    def _admit(self) -> None:
        chunk = 0
        while self.waiting and chunk < PREFILL_CHUNK:
            sequence = self.waiting[0]
            whole = sequence.context + sequence.left
            if not self._make_room(whole, sequence.session) and (self.running or self._prefilling):
                return
            self.waiting.popleft()
            kept = self._cache.pop(sequence.session, 0)
            self._cached -= kept
            sequence.fetched = self._fetches(sequence, kept)
            sequence.uncached = max(1, sequence.context - kept - sequence.fetched)
            sequence.causes = self._causes(sequence)
            sequence.reserved = whole
            self._reserved += whole
            self._prefilling.append(sequence)
            chunk += sequence.uncached

    def _fetches(self, sequence: Sequence, has: int) -> int:
        """Tokens whose keys come from other engines, where that is quicker than to prefill."""
        if self._kept is None or self._reader is None:
            return 0
        lacks = max(0, min(self._kept.held(sequence.session), sequence.context - 1) - has)
        if not lacks:
            return 0
        computed = self._prefill_of(lacks, pairs(lacks, has)) / (self.speed or 1.0)
        return self._reader.fetched(lacks, computed / lacks)

    def _causes(self, sequence: Sequence) -> Mapping[Cause, int]:
        if self._history is None:
            return {}
        session, whole = sequence.session, sequence.context
        in_tier = 0 if self._kept is None else self._kept.held(session)
        return self._history.causes(session, range(whole - sequence.uncached, whole), in_tier)

    def _note_made(self, sequence: Sequence) -> None:
        if self._history is not None:
            self._history.note(sequence.session, sequence.context + sequence.produced)

    def _make_room(self, tokens: int, session: str) -> bool:
        own = self._cache.get(session, 0)
        while self._reserved + self._cached - own + tokens > self.kv_tokens:
            oldest = next((key for key in self._cache if key != session), None)
            if oldest is None:
                return False
            self._cached -= self._cache.pop(oldest)
        return True

    def _plan(self) -> None:
        if self._event is not None:
            self._event.cancel()
            self._event = None
        if self.speed <= 0.0:
            return
        if self._prefilling:
            rest = self._total - self._work
        elif self._steps:
            rest = time_of(self._first, self._growth, self._steps) - self._work
        else:
            return
        self._event = self._clock.after(max(0.0, rest) / self.speed, self._end)

    def _end(self) -> None:
        """The phase is over."""
        self._event = None
        self._settle()
        if self._prefilling:
            self._first_tokens()
        elif self._steps:
            self._advance(self._steps)
        done = [sequence for sequence in self.running if sequence.left <= 0]
        if done:
            self.running = [sequence for sequence in self.running if sequence.left > 0]
            for sequence in done:
                self._release(sequence, keep=True)
                self._write(sequence, sequence.context + sequence.produced)
        self._choose()
        self._note_busy()
        for sequence in done:
            sequence.on_done()

    def _first_tokens(self) -> None:
        fresh, self._prefilling = self._prefilling, []
        for sequence in fresh:
            self.prefilled += sequence.uncached
            sequence.produced += 1
            sequence.left -= 1
            self.tokens += 1
            self._context += sequence.context + sequence.produced
            self.running.append(sequence)
            self._write(sequence, sequence.context)
            self._note_made(sequence)
        for sequence in fresh:
            sequence.on_first()

    def _write(self, sequence: Sequence, tokens: int) -> None:
        if self._reader is not None and sequence.session:
            self._reader.write(sequence.session, tokens, self._clock.now_s)

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        self._reserved -= sequence.reserved
        length = sequence.context + sequence.produced
        if sequence.produced:
            self._context -= length
            self._note_made(sequence)
        if keep and sequence.session and self._make_room(length, sequence.session):
            self._cached += length - self._cache.pop(sequence.session, 0)
            self._cache[sequence.session] = length
