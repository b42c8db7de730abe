"""The router's shell on virtual time: queue, legs, moves; placement is production's or the paper's.

``ours`` keeps the tokens of a cut turn and continues it elsewhere; ``rose-paper`` samples it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rose_core.identity import WeightVersion
from rose_core.rollouts.admission import rank
from rose_core.rollouts.estimates import Hazard, Speed
from rose_core.rollouts.placement import EngineView, Placement, Policy, TurnView, obstacle, place
from rose_core.rollouts.watch import LegView, Patience, judge
from rose_core.simulate.batch import BatchEngine, Sequence
from rose_core.simulate.clock import SECOND, Clock, Event
from rose_core.wire.routing import EngineKind

_LOOK_AGAIN_S = 1.0


@dataclass(eq=False)
class Engine:
    """An engine attached to the router.

    Attributes:
        version: publishes it has; None before its first weights are attested.
        gate_ns: when the gate last moved.
        ready_s: when everything that was sent to it so far is applied.
    """

    name: str
    kind: EngineKind
    batch: BatchEngine | None
    version: int | None
    gate_open: bool
    cap: int
    gate_ns: int = 0
    legs: list[Leg] = field(default_factory=list)
    speed: Speed | None = None
    hazard: Hazard = field(default_factory=Hazard)
    look: Event | None = None
    reclaims: int = 0
    full_cap: int = 0
    ready_s: float = 0.0

    def __post_init__(self) -> None:
        """A cap that was cut may come back."""
        self.full_cap = self.cap


@dataclass(eq=False, slots=True)
class Turn:
    """One turn of a trajectory; ``held`` of its ``output`` tokens cannot be lost any more."""

    session: str
    context: int
    output: int
    number: int
    done: Callable[[], None]
    held: int = 0
    home: str = ""
    cached: int = 0
    home_version: int = 0
    avoid: str = ""
    versions: list[int] = field(default_factory=list)
    arrived_ns: int = 0


@dataclass(eq=False, slots=True)
class Leg:
    """A turn on an engine."""

    turn: Turn
    engine: Engine
    sequence: Sequence
    began_ns: int
    first_ns: int = 0


@dataclass
class Counts:
    """What the router counts."""

    turns: int = 0
    moves: int = 0
    redone_tokens: int = 0
    again_prefilled: int = 0
    borrowed_tokens: int = 0
    tokens: int = 0
    queue_s: float = 0.0


class Router:
    """The router of one job.

    Args:
        policy: knobs of placement; the ladder uses its staleness bound alone.
        ladder: the paper's placement order instead of ours.
        stall_s: a turn leaves an engine that was closed for so long; None = production's.
        keeps: tokens of a cut turn are kept.
        knows_lengths: the clairvoyant bound's placement is told the true output length.
    """

    def __init__(
        self,
        clock: Clock,
        run: str,
        policy: Policy,
        *,
        ladder: bool,
        stall_s: float | None,
        keeps: bool,
        knows_lengths: bool,
    ) -> None:
        self._clock, self._run = clock, run
        self._ladder, self._keeps, self._knows = ladder, keeps, knows_lengths
        self._policy = policy
        self._patience = Patience() if stall_s is None else Patience(pause_seconds=stall_s)
        self.engines: dict[str, Engine] = {}
        self._queue: list[Turn] = []
        self._usual = 128.0
        self._usual_speed = Speed()
        self.head = 0
        self.counts = Counts()

    # --- engines

    def attach(self, engine: Engine) -> None:
        """An engine has come."""
        self.engines[engine.name] = engine
        self.drain()

    def gate(self, name: str, is_open: bool) -> None:
        """An engine's gate has moved."""
        engine = self.engines.get(name)
        if engine is None or engine.gate_open == is_open:
            return
        now = self._clock.now_ns
        since = (now - engine.gate_ns) / SECOND
        was_open, engine.gate_open, engine.gate_ns = engine.gate_open, is_open, now
        reclaimed = not was_open and since >= self._patience.pause_seconds
        engine.hazard = engine.hazard.passed(since, is_open=was_open, reclaimed=reclaimed)
        engine.reclaims += not is_open
        if is_open:
            self.drain()
        elif engine.legs:
            self._look_later(engine, self._patience.pause_seconds)

    def lost(self, name: str) -> None:
        """The engine is gone; its turns go on elsewhere."""
        engine = self.engines.pop(name, None)
        if engine is None:
            return
        for leg in list(engine.legs):
            self._end(leg, kept=self._keeps, inside=False)
            self._requeue(leg.turn, avoid="")
        self.drain()

    def version(self, name: str, version: int) -> None:
        """Weights are attested on an engine."""
        engine = self.engines.get(name)
        if engine is not None and (engine.version is None or version > engine.version):
            engine.version = version
            self.head = max(self.head, version)
            self.drain()

    def cut_to(self, name: str, cap: int) -> None:
        """Fewer turns at a time; the youngest above the cap leave."""
        engine = self.engines[name]
        engine.cap = cap
        for leg in engine.legs[cap:]:
            self._move(leg)

    def restore(self, name: str) -> None:
        """The cap is as it was at first."""
        self.engines[name].cap = self.engines[name].full_cap
        self.drain()

    # --- turns

    def submit(self, turn: Turn) -> None:
        """A turn has come."""
        turn.arrived_ns = self._clock.now_ns
        self.counts.turns += 1
        self._queue.append(turn)
        self._queue.sort(key=lambda one: rank(one.held > 0, 0, one.number))
        self.drain()

    def drain(self) -> None:
        """Place what waits, in order, until one must wait."""
        while self._queue:
            name = self._choose(self._queue[0])
            if name is None:
                return
            self._begin(self._queue.pop(0), self.engines[name])

    def _choose(self, turn: Turn) -> str | None:
        view = self._turn_view(turn)
        views = [self._view(engine) for engine in self.engines.values() if engine.legs is not None]
        head = self._label(self.head)
        now = self._clock.now_s
        if self._ladder:
            return self._by_ladder(view, views, head, now)
        answer = place(view, views, head, self._policy, now)
        return answer.engine if isinstance(answer, Placement) else None

    def _by_ladder(
        self, turn: TurnView, views: list[EngineView], head: WeightVersion, now: float
    ) -> str | None:
        """Paper, section 4.3: last worker, serving GPUs that pass, least loaded, queue."""
        able = [one for one in views if obstacle(turn, one, head, self._policy, now) is None]
        if any(one.name == turn.home for one in able):
            return turn.home
        borrowed = [one for one in able if one.kind is EngineKind.BORROWED]
        chosen = min(borrowed or able, key=lambda one: (one.live / one.cap, one.name), default=None)
        return chosen.name if chosen else None

    def _turn_view(self, turn: Turn) -> TurnView:
        home = self.engines.get(turn.home)
        same = home is not None and home.version == turn.home_version
        expected = turn.output - turn.held if self._knows else max(1, round(self._usual))
        return TurnView(
            context=turn.context + turn.held,
            expected=expected,
            home=turn.home,
            cached=turn.cached if same else 0,
            avoid=frozenset({turn.avoid} if turn.avoid else ()),
        )

    def _view(self, engine: Engine) -> EngineView:
        version = None if engine.version is None else self._label(engine.version)
        return EngineView(
            engine.name,
            engine.kind,
            version,
            engine.gate_open and engine.batch is not None,
            engine.cap,
            live=len(engine.legs),
            speed=engine.speed or self._usual_speed,
            hazard=engine.hazard,
        )

    def _label(self, version: int) -> WeightVersion:
        return WeightVersion(self._run, 0, version)

    def _begin(self, turn: Turn, engine: Engine) -> None:
        now = self._clock.now_ns
        self.counts.queue_s += (now - turn.arrived_ns) / SECOND
        assert engine.batch is not None  # noqa: S101  # placement took it as open
        # Prefix caches are kept apart by version, so keys of older weights are of no use.
        sequence = Sequence(
            f"{turn.session}@{engine.version}",
            turn.context + turn.held,
            turn.output - turn.held,
            on_first=lambda: self._first(leg),
            on_done=lambda: self._done(leg),
        )
        leg = Leg(turn, engine, sequence, now)
        turn.versions.append(engine.version or 0)
        engine.legs.append(leg)
        engine.batch.submit(sequence)

    def _first(self, leg: Leg) -> None:
        leg.first_ns = self._clock.now_ns
        engine = leg.engine
        if engine.gate_ns <= leg.began_ns:
            waited = (leg.first_ns - leg.began_ns) / SECOND
            self._saw(engine, lambda speed: speed.saw_first_token(waited, leg.sequence.uncached))

    def _done(self, leg: Leg) -> None:
        engine, sequence = leg.engine, leg.sequence
        if engine.gate_ns <= leg.first_ns and sequence.produced > 1:
            spent = (self._clock.now_ns - leg.first_ns) / SECOND
            step = spent / (sequence.produced - 1)
            # Production learns from every token with a weight of 0.1; here once for all of them.
            weight = 1.0 - 0.9 ** (sequence.produced - 1)
            self._saw(engine, lambda speed: speed.saw_step(step, weight))
        self._end(leg, kept=True, inside=False)
        turn = leg.turn
        turn.home, turn.cached = engine.name, turn.context + turn.output
        turn.home_version = turn.versions[-1]
        self._usual += 0.02 * (turn.output - self._usual)
        turn.done()
        self.drain()

    def _saw(self, engine: Engine, learn: Callable[[Speed], Speed]) -> None:
        """Learn the speed of one engine, and from it what to expect of new ones."""
        engine.speed = learn(engine.speed or self._usual_speed)
        self._usual_speed = learn(self._usual_speed)

    def _end(self, leg: Leg, *, kept: bool, inside: bool) -> None:
        engine, sequence, turn = leg.engine, leg.sequence, leg.turn
        if inside and engine.batch is not None:
            engine.batch.remove(sequence)
        engine.legs.remove(leg)
        self.counts.tokens += sequence.produced
        self.counts.again_prefilled += sequence.uncached
        if engine.kind is EngineKind.BORROWED:
            self.counts.borrowed_tokens += sequence.produced
        if kept:
            turn.held += sequence.produced
        else:
            self.counts.redone_tokens += sequence.produced + turn.held
            turn.held = 0
            turn.versions.clear()

    def _requeue(self, turn: Turn, avoid: str) -> None:
        self.counts.moves += 1
        turn.avoid, turn.arrived_ns = avoid, self._clock.now_ns
        self._queue.append(turn)
        self._queue.sort(key=lambda one: rank(one.held > 0, 0, one.number))

    def _move(self, leg: Leg) -> None:
        self._end(leg, kept=self._keeps, inside=True)
        self._requeue(leg.turn, avoid="")

    # --- watching closed gates

    def _look_later(self, engine: Engine, seconds: float) -> None:
        if engine.look is not None:
            engine.look.cancel()
        engine.look = self._clock.after(seconds, lambda: self._look(engine))

    def _look(self, engine: Engine) -> None:
        """Legs on an engine whose gate has been closed for long."""
        engine.look = None
        if engine.gate_open or not engine.legs or engine.name not in self.engines:
            return
        now = self._clock.now_s
        for leg in list(engine.legs):
            view = LegView(True, False, False, engine.gate_ns / SECOND, leg.began_ns / SECOND)
            elsewhere = self._choose(leg.turn) is not None
            if judge(view, self._patience, elsewhere, now) is not None:
                self._move(leg)
                self.drain()
        if engine.legs:
            self._look_later(engine, _LOOK_AGAIN_S)
