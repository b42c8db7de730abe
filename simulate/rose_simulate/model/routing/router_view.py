"""What a router's rules are shown of engines and turns, and what is learned of speeds and lengths.

Views of engines are made anew only where something has changed; every other figure is production's
(``rollouts.engines.estimates``, ``rollouts.trajectories.prospects``). Next step: ``router`` asks
the rules with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.estimates import Speed
from rose_core.rollouts.placement.dispatch import DispatchState
from rose_core.rollouts.placement.residency import Residents
from rose_core.rollouts.placement.selection import (
    EngineView,
    Policy,
    PolicyName,
    RolloutOutlook,
    TurnView,
)
from rose_core.rollouts.trajectories.prospects import Prospects
from rose_simulate.model.clock import VirtualClock
from rose_simulate.model.routing.turns import AttachedEngine, RoutedTurn

_NO_OUTLOOK = RolloutOutlook()
# Rules that ask what is known of a trajectory; the others do without, which is quicker to simulate.
_REMEMBER = frozenset({PolicyName.JOINT, PolicyName.LONG_TO_BORROWED, PolicyName.LATE_TO_BORROWED})
_USUAL_OUTPUT = 128.0


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
    """Views for one router's rules.

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
        return self._known.prospects.with_expectation(turn.session, view, self._clock.now_s)

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
        )

    def _label(self, version: int) -> WeightVersion:
        return WeightVersion(self._run, 0, version)
