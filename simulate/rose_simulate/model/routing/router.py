"""The router's shell on virtual time: queue, legs, moves; every choice is ``rose_core.rollouts``.

Which turn goes next and where is production's (``dispatch``, ``placement`` by the policy's name,
with what ``prospects`` remembers of trajectories) or, for the paper's rules, first come first
served. A cut turn goes on elsewhere from its tokens, or is sampled anew where a regime cannot keep
them. What the choices see is made by ``RouterView``.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.capacity.admission import rank
from rose_core.rollouts.engines.estimates import Speed, weight_of
from rose_core.rollouts.placement.dispatch import DispatchState, next_turn
from rose_core.rollouts.placement.residency import Residents
from rose_core.rollouts.placement.selection import (
    EngineView,
    Placement,
    Policy,
    PolicyName,
    RolloutOutlook,
    TurnView,
    place,
)
from rose_core.rollouts.placement.watch import LegView, queues
from rose_core.rollouts.terms import Policies
from rose_core.rollouts.trajectories.prospects import Hint, Prospects
from rose_core.wire.routing import EngineKind
from rose_simulate.model.clock import SECOND, Event, VirtualClock
from rose_simulate.model.gpus.batch import Sequence
from rose_simulate.model.routing.turns import (
    AttachedEngine,
    Counts,
    PausedLeg,
    RoutedLeg,
    RoutedTurn,
)
from rose_simulate.model.routing.warming import SimulatedWarmer, WarmingContext

_ROUNDING_S = 1e-6  # two moments' difference in floats may be a little less than what it is
_NO_OUTLOOK = RolloutOutlook()
# Rules that ask what is known of a trajectory; the others do without, which is quicker to simulate.
_REMEMBER = frozenset({PolicyName.JOINT, PolicyName.LONG_TO_BORROWED, PolicyName.LATE_TO_BORROWED})
_USUAL_OUTPUT = 128.0


class Ends(Enum):
    """How the router learns that a trajectory is over, before the trainer says what became of it.

    Attributes:
        REPORTED: its trainer says so (``/finish_session``).
        INFERRED: it is idle for long (``rollouts.trajectories.inference``), as production does
        unasked. UNKNOWN: not at all, which no router of ours does: what inferring is measured
        against.
    """

    REPORTED = auto()
    INFERRED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class RouterOptions:
    """How a regime's router behaves.

    Attributes:
        keeps: tokens of a cut turn are kept.
        waits: production's order: a full home is waited for, old trajectories go first.
        knows_lengths: placement is told the true output length.
        oldest_first: without ``waits``, old trajectories go first; otherwise turns as they came.
        ends: how it learns that a trajectory is over.
    """

    keeps: bool = True
    waits: bool = True
    knows_lengths: bool = False
    oldest_first: bool = False
    ends: Ends = Ends.INFERRED


class Router:
    """The router of one job."""

    def __init__(
        self,
        clock: VirtualClock,
        run: str,
        policies: Policies,
        manners: RouterOptions,
        draw: random.Random,
    ) -> None:
        self._clock, self._manners, self._draw = clock, manners, draw
        self.policies = policies
        policy, self._patience = policies.placement, policies.patience
        self._policy = policy
        self.engines: dict[str, AttachedEngine] = {}
        self._queue: list[RoutedTurn] = []
        self._paused: list[PausedLeg] = []
        self._again: Event | None = None
        self.counts = Counts()
        self.prospects = policies.memory()
        self._residents = Residents()
        known = RouterMemory(self.engines, self.prospects, self._residents)
        self._sight = RouterView(clock, run, policy, known, knows_lengths=manners.knows_lengths)
        self._warms = manners.waits and policy.name is PolicyName.JOINT
        around = WarmingContext(
            self.engines,
            self._residents,
            lambda: self._sight.scene(self._sight.engines(), lambda: 1.0),
            self._sight.turn,
            lambda: len(self._queue),
            self.counts.causes,
        )
        self.warmer = SimulatedWarmer(clock, around)

    # --- engines

    def attach(self, engine: AttachedEngine) -> None:
        """An engine has come."""
        self.engines[engine.name] = engine
        self._sight.invalidate(engine.name)
        if engine.batch is not None:
            self._residents.set_pool(engine.name, engine.batch.kv_tokens)
        self.drain()

    def on_gate(self, name: str, is_open: bool) -> None:
        """Follow an engine's gate."""
        engine = self.engines.get(name)
        if engine is None or engine.gate_open == is_open:
            return
        self._sight.invalidate(name)
        now = self._clock.now_ns
        since = (now - engine.gate_ns) / SECOND
        was_open, engine.gate_open, engine.gate_ns = engine.gate_open, is_open, now
        reclaimed = not was_open and since >= self._patience.pause_seconds
        engine.hazard = engine.hazard.passed(since, is_open=was_open, reclaimed=reclaimed)
        engine.reclaims += not is_open
        if is_open:
            self._paused = [one for one in self._paused if one.leg.engine is not engine]
            self.drain()
        elif engine.legs:
            self._look_later(engine, self._patience.pause_seconds + _ROUNDING_S)

    def on_engine_loss(self, name: str) -> None:
        """Forget an engine that is gone; its turns go on elsewhere."""
        engine = self.engines.pop(name, None)
        if engine is None:
            return
        self._residents.drop_engine(name)
        for leg in list(engine.legs):
            self._end(leg, kept=self._manners.keeps, inside=False)
            leg.turn.losses += 1
            self._requeue(leg.turn)
        self.drain()

    def on_version(self, name: str, version: int) -> None:
        """Note the version attested on an engine."""
        engine = self.engines.get(name)
        if engine is not None and (engine.version is None or version > engine.version):
            engine.version = version
            self._sight.invalidate(name)
            self.on_publish(version)
            self.drain()

    def on_publish(self, version: int) -> None:
        """Note that the newest version is at least this one."""
        self._sight.note_publish(version)

    def cut_to(self, name: str, cap: int) -> None:
        """Fewer turns at a time; the youngest above the cap leave."""
        engine = self.engines[name]
        engine.cap = cap
        self._sight.invalidate(name)
        for leg in engine.legs[cap:]:
            self._end(leg, kept=self._manners.keeps, inside=True)
            self._requeue(leg.turn)
        self.drain()

    def restore(self, name: str) -> None:
        """The cap is as it was at first."""
        self.engines[name].cap = self.engines[name].full_cap
        self._sight.invalidate(name)
        self.drain()

    # --- turns

    @property
    def inside(self) -> int:
        """Turns that wait or run."""
        return len(self._queue) + sum(len(engine.legs) for engine in self.engines.values())

    @property
    def waiting(self) -> tuple[RoutedTurn, ...]:
        """Turns without an engine, the next one first."""
        return tuple(self._queue)

    @property
    def newest(self) -> str:
        """The newest version known, by name."""
        return str(self._sight.head)

    def submit(self, turn: RoutedTurn) -> None:
        """A turn has come."""
        self.counts.turns += 1
        turn.new = turn.context - turn.cached
        if self._sight.remembers:
            now = self._clock.now_s
            if self._manners.ends is not Ends.UNKNOWN:
                self.prospects.infer_ends(now)
            self.prospects.begin_turn(turn.session, Hint(turn.group), turn.context, now)
        self.warmer.begin_turn(turn)
        self._wait(turn)
        self.drain()

    def end_trajectory(self, session: str) -> None:
        """No more turns of the trajectory will come; whoever trains says so, or does not."""
        if self._manners.ends is Ends.REPORTED:
            self.prospects.end_trajectory(session)

    def withdraw(self, turn: RoutedTurn) -> int:
        """The trainer does not want the turn any more; the tokens it had written."""
        if turn in self._queue:
            self._queue.remove(turn)
        legs = (leg for engine in self.engines.values() for leg in engine.legs)
        for leg in [leg for leg in legs if leg.turn is turn]:
            self._end(leg, kept=True, inside=True)
        self.prospects.forget(turn.session)
        self.warmer.forget(turn.session)
        return turn.held

    def _wait(self, turn: RoutedTurn) -> None:
        turn.since, turn.view = self._clock.now_s, self._sight.turn(turn)
        insort(self._queue, turn, key=self._rank)

    def _rank(self, turn: RoutedTurn, written: int = 0) -> tuple[bool, int, int]:
        by_age = self._manners.waits or self._manners.oldest_first
        return rank(turn.held + written > 0, 0, turn.born if by_age else turn.number)

    def drain(self) -> None:
        """Place what waits, until nothing more can be placed now."""
        while self._queue or self._paused:
            views = self._sight.engines()
            if not any(view.gate_open and view.live < view.cap for view in views):
                return
            chosen = self._next(views)
            if chosen is None:
                return
            self._place(*chosen)

    def _place(self, one: RoutedTurn | PausedLeg, engine: str) -> None:
        if isinstance(one, PausedLeg):
            turn = one.leg.turn
            self._end(one.leg, kept=self._manners.keeps, inside=True)
            self.counts.moves += 1
            turn.since, turn.view = self._clock.now_s, one.view
        else:
            turn = one
            self._queue.remove(turn)
        self._begin(turn, self.engines[engine])

    def _next(self, views: list[EngineView]) -> tuple[RoutedTurn | PausedLeg, str] | None:
        order = self._order()
        if not self._manners.waits:
            first, head, now = order[0], self._sight.head, self._clock.now_s
            answer = place(first.view, views, head, self._policy, now)
            return (first, answer.engine) if isinstance(answer, Placement) else None
        scene = self._sight.scene(views, self._draw.random)
        chosen, again = next_turn(order, scene)
        if again is not None:
            self._drain_at(again)
        return None if chosen is None else (order[chosen[0]], chosen[1].engine)

    def _order(self) -> abc.Sequence[RoutedTurn | PausedLeg]:
        """Who waits, those at closed gates among them, in the order in which they are tried."""
        if not self._paused:
            return self._queue
        ranked: list[tuple[tuple[bool, int, int], RoutedTurn | PausedLeg]]
        ranked = [(one.key, one) for one in self._paused]
        ranked += [(self._rank(one), one) for one in self._queue]
        return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]

    def _drain_at(self, seconds: float) -> None:
        if self._again is not None:
            self._again.cancel()
        self._again = self._clock.at(round(seconds * SECOND) + 1, self.drain)

    # --- legs

    def _begin(self, turn: RoutedTurn, engine: AttachedEngine) -> None:
        now = self._clock.now_ns
        self.counts.queue_s += now / SECOND - turn.since
        assert engine.batch is not None  # noqa: S101  # placement took it as open
        if self._sight.remembers:
            self.prospects.note_placement(
                turn.session, engine.kind, left_home=self._left(turn, engine)
            )
        # Prefix caches are kept apart by version, so keys of older weights are of no use.
        sequence = Sequence(
            f"{turn.session}@{engine.version}",
            turn.context + turn.held,
            turn.output - turn.held,
            on_first=lambda: self._first(leg),
            on_done=lambda: self._done(leg),
        )
        leg = RoutedLeg(turn, engine, sequence, now)
        turn.versions.append(engine.version or 0)
        engine.legs.append(leg)
        self._sight.invalidate(engine.name)
        self._residents.begin_turn(engine.name, turn.session, turn.context + turn.view.expected)
        self.warmer.note_placement(turn, engine)
        engine.batch.submit(sequence)

    def _left(self, turn: RoutedTurn, engine: AttachedEngine) -> bool:
        """Whether it goes elsewhere although its home would have had room."""
        home = self.engines.get(turn.home)
        could = home is not None and home.gate_open and len(home.legs) < home.cap
        return could and home is not engine

    def _first(self, leg: RoutedLeg) -> None:
        leg.first_ns = self._clock.now_ns
        if leg.engine.gate_ns <= leg.began_ns:
            waited, uncached = (leg.first_ns - leg.began_ns) / SECOND, leg.sequence.uncached
            self._sight.learn(leg.engine, lambda speed: speed.saw_first_token(waited, uncached))

    def _done(self, leg: RoutedLeg) -> None:
        turn = leg.turn
        if turn.withdrawn:
            return  # by what another turn that ended in the same step has led to
        self._learn_step(leg)
        self._end(leg, kept=True, inside=False)
        turn.home, turn.cached = leg.engine.name, turn.context + turn.output
        turn.home_version = turn.versions[-1]
        self._sight.note_tokens(turn.output)
        if self._sight.remembers:
            now = self._clock.now_s
            self.prospects.end_turn(turn.session, turn.output, turn.cached, now)
        if self._warms:
            self.warmer.end_turn(turn)
        turn.done()
        self.drain()

    def _learn_step(self, leg: RoutedLeg) -> None:
        """How long a step took, where the gate stood open all the time."""
        steps = leg.sequence.produced - 1
        if leg.engine.gate_ns > leg.first_ns or steps < 1:
            return
        step = (self._clock.now_ns - leg.first_ns) / SECOND / steps
        # Production learns step by step; here once for all of a turn.
        weight, live = weight_of(steps), len(leg.engine.legs)
        self._sight.learn(leg.engine, lambda speed: speed.saw_step(step, weight, live))

    def _end(self, leg: RoutedLeg, *, kept: bool, inside: bool) -> None:
        engine, sequence, turn = leg.engine, leg.sequence, leg.turn
        if inside and engine.batch is not None:
            engine.batch.remove(sequence)
        engine.legs.remove(leg)
        self._paused = [one for one in self._paused if one.leg is not leg]
        self._sight.invalidate(engine.name)
        keys = sequence.context + sequence.produced
        self._residents.end_turn(engine.name, turn.session, keys, self._clock.now_s)
        self.counts.tokens += sequence.produced
        self.counts.again_prefilled += sequence.uncached
        self.counts.fetched_tokens += sequence.fetched
        self.counts.causes.update(sequence.causes)
        if sequence.uncached:
            self.counts.new_tokens += turn.new
            turn.new = 0
        if engine.kind is EngineKind.BORROWED:
            self.counts.borrowed_tokens += sequence.produced
            self.counts.borrowed_prefilled += sequence.uncached
        if kept:
            turn.held += sequence.produced
        else:
            self.counts.redone_tokens += sequence.produced + turn.held
            turn.held = 0
            turn.versions.clear()

    def _requeue(self, turn: RoutedTurn) -> None:
        self.counts.moves += 1
        self._wait(turn)

    # --- watching closed gates

    def _look_later(self, engine: AttachedEngine, seconds: float) -> None:
        if engine.look is not None:
            engine.look.cancel()
        engine.look = self._clock.after(seconds, lambda: self._look(engine))

    def _look(self, engine: AttachedEngine) -> None:
        """Legs on an engine whose gate has been closed for long: their turns wait, too."""
        engine.look = None
        if engine.gate_open or engine.name not in self.engines:
            return
        now, since = self._clock.now_s, engine.gate_ns / SECOND
        for leg in engine.legs:
            view = LegView(True, False, False, since, leg.began_ns / SECOND)
            if queues(view, self._patience, now):
                self._paused.append(self._paused_leg(leg, since))
        self.drain()

    def _paused_leg(self, leg: RoutedLeg, since: float) -> PausedLeg:
        """A turn as the queue sees it: cut now, and with its keys where it stands."""
        turn, written = leg.turn, leg.sequence.produced if self._manners.keeps else 0
        view = self._sight.turn(turn)
        context, expected = view.context + written, max(1, view.expected - written)
        view = replace(
            view,
            context=context,
            expected=expected,
            home=leg.engine.name,
            cached=context,
            begins=view.begins and not written,
        )
        return PausedLeg(self._rank(turn, written), view, since, leg)


@dataclass(frozen=True)
class RouterMemory:
    """What a router remembers.

    Attributes:
        engines: by name.
        prospects: of trajectories.
        residents: whose keys are where.
    """

    engines: Mapping[str, AttachedEngine]
    prospects: Prospects
    residents: Residents


class RouterView:
    """What a router's rules are shown of engines and turns; what is learned of speeds and lengths.

    Views of engines are made anew only where something has changed; every other figure is
    production's (``rollouts.engines.estimates``, ``rollouts.trajectories.prospects``).

    Args:
        clock: virtual time.
        run: whose weights they are.
        policy: the rules' knobs.
        known: what the router remembers.
        knows_lengths: turns are shown with their true output length.
    """

    def __init__(
        self,
        clock: VirtualClock,
        run: str,
        policy: Policy,
        known: RouterMemory,
        *,
        knows_lengths: bool,
    ) -> None:
        self._clock, self._run, self._policy = clock, run, policy
        self._known, self._knows_lengths = known, knows_lengths
        self.remembers = policy.name in _REMEMBER
        self._views: dict[str, EngineView] = {}
        self._usual_output = _USUAL_OUTPUT
        self._usual_speed = Speed()
        self._head = 0

    # --- what has happened

    def invalidate(self, engine: str) -> None:
        """Make the engine's view anew when it is next asked for."""
        self._views.pop(engine, None)

    def note_publish(self, version: int) -> None:
        """Note that the newest version is at least this one."""
        self._head = max(self._head, version)
        self._known.prospects.note_head(self.head, self._clock.now_s)

    def note_tokens(self, output: int) -> None:
        """Note how many tokens a turn ended with."""
        self._usual_output += 0.02 * (output - self._usual_output)

    def learn(self, engine: AttachedEngine, learn: Callable[[Speed], Speed]) -> None:
        """Learn the speed of one engine, and from it what to expect of new ones."""
        self.invalidate(engine.name)
        engine.speed = learn(engine.speed or self._usual_speed)
        self._usual_speed = learn(self._usual_speed)

    # --- what the rules see

    @property
    def head(self) -> WeightVersion:
        """The newest version known."""
        return self._label(self._head)

    def engines(self) -> list[EngineView]:
        """All engines."""
        for name, engine in self._known.engines.items():
            if name not in self._views:
                self._views[name] = self._engine(engine)
        return [self._views[name] for name in self._known.engines]

    def turn(self, turn: RoutedTurn) -> TurnView:
        """One turn."""
        home = self._known.engines.get(turn.home)
        same = home is not None and home.version == turn.home_version
        left = turn.output - turn.held
        view = TurnView(
            context=turn.context + turn.held,
            expected=left if self._knows_lengths else max(1, round(self._usual_output)),
            home=turn.home,
            cached=turn.cached if same else 0,
            avoid=frozenset({turn.avoid} if turn.avoid else ()),
            losses=turn.losses,
        )
        if not self.remembers:
            return view
        view = self._known.prospects.with_expectation(turn.session, view, self._clock.now_s)
        return replace(view, begins=False) if view.begins and turn.held else view

    def scene(self, views: list[EngineView], dice: Callable[[], float]) -> DispatchState:
        """Everything that a choice among waiting turns looks at; ``dice`` gives 0 to 1."""
        now, outlook = self._clock.now_s, _NO_OUTLOOK
        if self.remembers:
            outlook = self._known.prospects.outlook(lambda: views, dice(), now)
        return DispatchState(views, self.head, self._policy, now, outlook, self._known.residents)

    def _engine(self, engine: AttachedEngine) -> EngineView:
        return EngineView(
            engine.name,
            engine.kind,
            None if engine.version is None else self._label(engine.version),
            engine.gate_open and engine.batch is not None,
            engine.cap,
            live=len(engine.legs),
            speed=engine.speed or self._usual_speed,
            hazard=engine.hazard,
            slowdown=engine.slowdown,
        )

    def _label(self, version: int) -> WeightVersion:
        return WeightVersion(self._run, 0, version)
