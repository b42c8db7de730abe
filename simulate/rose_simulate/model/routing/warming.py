"""Prefixes warmed while tools run, on virtual time; ``rollouts.placement.warming`` decides.

The router tells of turns that end and come, and of engines that go; a warmed prefix is a sequence
of one token in the engine's batch, and the turn that comes next has its home there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from rose_core.rollouts.placement.dispatch import DispatchState
from rose_core.rollouts.placement.residency import Residents
from rose_core.rollouts.placement.selection import TurnView
from rose_core.rollouts.placement.warming import (
    LOOK_SECONDS,
    Resting,
    ReturnRates,
    WarmBound,
    WarmOutcome,
    to_warm,
)
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.gpus.batch import Sequence
from rose_simulate.model.gpus.recomputed import Cause
from rose_simulate.model.routing.turns import AttachedEngine, RoutedTurn


@dataclass(eq=False)
class _Rest:
    """A trajectory between two turns; ``turn`` is the one that ended."""

    turn: RoutedTurn
    since: float
    times: int = 0
    warm: bool = False
    engine: AttachedEngine | None = None
    sequence: Sequence | None = None


@dataclass(frozen=True)
class WarmingContext:
    """What the router lends.

    Attributes:
        scene: what placement would be asked with now.
        view: a turn as placement would see it.
        waiting: how many turns wait.
        causes: why tokens are computed; those of prefixes that got warm are added.
    """

    engines: MutableMapping[str, AttachedEngine]
    residents: Residents
    scene: Callable[[], DispatchState]
    view: Callable[[RoutedTurn], TurnView]
    waiting: Callable[[], int]
    causes: Counter[Cause]


class SimulatedWarmer:
    """Warms prefixes of one router's trajectories."""

    def __init__(self, clock: VirtualClock, around: WarmingContext) -> None:
        self._clock, self._around = clock, around
        self._bound, self._returns = WarmBound(), ReturnRates()
        self._resting: dict[str, _Rest] = {}
        self._looking = False
        self.ended: Counter[WarmOutcome] = Counter()
        self.tokens = 0

    def end_turn(self, turn: RoutedTurn) -> None:
        """Note the end of a turn: its trajectory may come back."""
        after = RoutedTurn(turn.session, turn.context + turn.output, 0, 0, turn.done, turn.group)
        after.home, after.cached, after.home_version = turn.home, turn.cached, turn.home_version
        self._resting[turn.session] = _Rest(after, self._clock.now_s)
        self._look_later()

    def begin_turn(self, turn: RoutedTurn) -> None:
        """Note the next turn of a trajectory: its home is where the prefix is warm."""
        rest = self._resting.pop(turn.session, None)
        if rest is None:
            return
        self._returns.record_return(self._clock.now_s - rest.since)
        self._stop(rest, WarmOutcome.LATE)
        if rest.warm:
            turn.home, turn.cached = rest.turn.home, rest.turn.cached
            turn.home_version, turn.warmed = rest.turn.home_version, rest.turn.home

    def note_placement(self, turn: RoutedTurn, engine: AttachedEngine) -> None:
        """Note that the turn was given an engine."""
        if turn.warmed:
            self.ended[
                WarmOutcome.USED if turn.warmed == engine.name else WarmOutcome.ELSEWHERE
            ] += 1
            turn.warmed = ""

    def forget(self, session: str) -> None:
        """Nobody wants the trajectory any more."""
        rest = self._resting.pop(session, None)
        if rest is not None:
            self._drop(rest)

    def _drop(self, rest: _Rest) -> None:
        self._stop(rest, WarmOutcome.STOPPED)
        self.ended[WarmOutcome.UNUSED] += rest.warm

    def _stop(self, rest: _Rest, why: WarmOutcome) -> None:
        if rest.sequence is None or rest.engine is None:
            return
        if rest.engine.batch is not None:
            rest.engine.batch.remove(rest.sequence)
        self._around.residents.drop_session(rest.turn.session)
        rest.sequence = rest.engine = None
        self.ended[why] += 1

    def _look_later(self) -> None:
        if not self._looking and self._resting:
            self._looking = True
            self._clock.after(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = False
        now = self._clock.now_s
        for session, rest in list(self._resting.items()):
            engine = rest.engine
            gone = engine is not None and self._around.engines.get(engine.name) is not engine
            if engine is not None and (gone or not engine.gate_open):
                self._stop(rest, WarmOutcome.STOPPED)
            if now - rest.since > self._bound.seconds:
                del self._resting[session]
                self._returns.record_absence()
                self._drop(rest)
        busy = {one.engine.name for one in self._resting.values() if one.engine is not None}
        still = [self._as_resting(one) for one in self._resting.values() if one.engine is None]
        waiting = self._around.waiting()
        scene = self._around.scene()
        found = to_warm(
            still, scene, self._returns, waiting=waiting, warming=busy, bound=self._bound
        )
        for warm in found:
            self._begin(self._resting[warm.name], self._around.engines[warm.engine])
        self._look_later()

    def _as_resting(self, rest: _Rest) -> Resting:
        turn = rest.turn
        home = self._around.engines.get(turn.home)
        return Resting(
            name=turn.session,
            context=turn.context,
            since=rest.since,
            times=rest.times,
            home=turn.home,
            keys=home is not None and home.version == turn.home_version,
            shut_since=None if home is None or home.gate_open else home.gate_ns / SECOND,
            view=lambda: self._around.view(turn),
        )

    def _begin(self, rest: _Rest, engine: AttachedEngine) -> None:
        assert engine.batch is not None  # noqa: S101  # placement took it as open
        version, turn = engine.version or 0, rest.turn
        rest.times += 1
        rest.engine = engine
        rest.sequence = sequence = Sequence(
            f"{turn.session}@{engine.version}",
            turn.context,
            1,
            on_first=_nothing,
            on_done=lambda: self._done(rest, sequence, version),
        )
        self._around.residents.begin_turn(engine.name, turn.session, turn.context)
        engine.batch.submit(sequence)

    def _done(self, rest: _Rest, sequence: Sequence, version: int) -> None:
        if rest.sequence is not sequence or rest.engine is None:
            return
        engine, turn = rest.engine, rest.turn
        self.tokens += sequence.uncached
        self._around.causes.update(sequence.causes)
        self.ended[WarmOutcome.UNUSED] += rest.warm  # it was warm somewhere else, for nothing
        turn.home, turn.cached, turn.home_version = engine.name, turn.context, version
        now = self._clock.now_s
        self._around.residents.end_turn(engine.name, turn.session, turn.context, now)
        rest.warm, rest.engine, rest.sequence = True, None, None


def _nothing() -> None:
    """Nobody waits for a token."""
