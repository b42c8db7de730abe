"""Asks engines to prefill the contexts of trajectories whose tools are running.

What and where is ``rose_core.rollouts.placement.warming``'s; this sends the prefill as a request of
one token, ends it when the gate closes, the engine changes or the turn comes first, and counts. It
keeps finished turns for as long as it may warm them, which is shorter than the ledger does anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from rose_core.rollouts.errors import BrokenStream
from rose_core.rollouts.placement.dispatch import DispatchState
from rose_core.rollouts.placement.selection import PolicyName, TurnView
from rose_core.rollouts.placement.warming import (
    LOOK_SECONDS,
    Resting,
    ReturnRates,
    WarmBound,
    WarmOutcome,
    to_warm,
)
from rose_core.rollouts.transcripts.transcript import StreamEvent
from rose_router import metrics
from rose_router.engines.engine_client import Target
from rose_router.engines.fleet import Engine
from rose_router.errors import EngineRefused, LegLost
from rose_router.turns.sessions import Home
from rose_router.turns.state import RouterParts
from rose_router.turns.turn import Turn, TurnState

_MOST_ASKED = 256  # trajectories looked at in one go, the newest; a look must not hold up streams


_JOINT = PolicyName.JOINT  # named once: an enum's member is slow to find


@dataclass(eq=False)
class _Rest:
    """A trajectory between two turns; ``turn`` is the one that ended."""

    turn: Turn
    since: float
    context: int
    times: int = 0
    warm: str = ""
    engine: Engine | None = None
    task: asyncio.Task[None] | None = None


class Warmer:
    """Warms prefixes.

    Args:
        state: of the router.
        view: a turn as placement would see its trajectory's next one.
    """

    def __init__(self, state: RouterParts, view: Callable[[Turn], TurnView]) -> None:
        self._policy = state.settings.policies.placement
        self._fleet, self._queue, self._fences = state.fleet, state.queue, state.fences
        self._sessions, self._outlook, self._clock = state.sessions, state.outlook, state.clock
        self._client, self._new_rid = state.outside.client, state.outside.new_rid
        self._view = view
        self._bound, self._returns = WarmBound(), ReturnRates()
        self._resting: dict[str, _Rest] = {}
        self._warmed_for: dict[Turn, str] = {}

    def __len__(self) -> int:
        return sum(rest.task is not None for rest in self._resting.values())

    def begin_turn(self, turn: Turn) -> None:
        """Note a turn that has come: its trajectory rests no more."""
        rest = self._resting.pop(turn.request.trajectory, None)
        if rest is None:
            return
        self._returns.record_return(turn.began - rest.since)
        self._stop(rest, WarmOutcome.LATE)
        if rest.warm:
            self._warmed_for[turn] = rest.warm

    def end_turn(self, turn: Turn) -> None:
        """Note the end of a turn: its trajectory rests, and may come back."""
        warm, legs = self._warmed_for.pop(turn, ""), turn.transcript.legs
        if warm:
            used = bool(legs) and legs[0].engine == warm
            metrics.WARMED.labels(WarmOutcome.USED if used else WarmOutcome.ELSEWHERE).inc()
        if self._policy.name is not _JOINT or not _comes_back(turn):
            return
        name, context = turn.request.trajectory, len(turn.transcript.prompt) + turn.held
        self._drop(self._resting.pop(name, None))  # of another turn of it, beside this one
        self._resting[name] = _Rest(turn, turn.ended, context)

    def drop(self, name: str) -> None:
        """Forget a trajectory whose caller says that it has ended."""
        self._drop(self._resting.pop(name, None))

    async def run(self) -> None:
        """Look again and again until cancelled."""
        due = self._clock()
        while True:
            self._stop_where_shut()
            if self._clock() >= due:
                self.look()
                due = self._clock() + LOOK_SECONDS
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._fleet.changed.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """End everything."""
        tasks = [rest.task for rest in self._resting.values() if rest.task is not None]
        for rest in self._resting.values():
            self._stop(rest, WarmOutcome.STOPPED)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._resting.clear()

    def look(self) -> None:
        """Begin what is worth it now."""
        now = self._clock()
        self._forget(now)
        if not self._resting or self._queue.held:
            return
        newest = islice(reversed(self._resting.values()), _MOST_ASKED)
        still = [self._as_resting(rest) for rest in newest if rest.task is None]
        busy = {one.engine.name for one in self._resting.values() if one.engine is not None}
        found = to_warm(
            still,
            self._scene(now),
            self._returns,
            waiting=len(self._queue),
            warming=busy,
            bound=self._bound,
        )
        for warm in found:
            engine = self._fleet.get(warm.engine)
            if engine is not None:
                self._begin(self._resting[warm.name], engine)

    def _scene(self, now: float) -> DispatchState:
        views, head = self._fleet.views(), self._fleet.head
        calm = replace(self._outlook(), dice=1.0)  # nothing begins here, so nothing explores
        return DispatchState(views, head, self._policy, now, calm, self._fleet.residents)

    def _forget(self, now: float) -> None:
        while self._resting:
            name, oldest = next(iter(self._resting.items()))
            if now - oldest.since <= self._bound.seconds:
                return
            del self._resting[name]
            self._returns.record_absence()
            self._drop(oldest)

    def _drop(self, rest: _Rest | None) -> None:
        if rest is not None:
            self._stop(rest, WarmOutcome.STOPPED)
            metrics.WARMED.labels(WarmOutcome.UNUSED).inc(bool(rest.warm))

    def _stop_where_shut(self) -> None:
        for rest in self._resting.values():
            engine = rest.engine
            if engine is not None and not (engine.gate_open and self._fleet.get(engine.name)):
                self._stop(rest, WarmOutcome.STOPPED)

    def _stop(self, rest: _Rest, why: WarmOutcome) -> None:
        if rest.task is not None:
            rest.task.cancel()
            rest.task = rest.engine = None
            metrics.WARMED.labels(why).inc()

    def _as_resting(self, rest: _Rest) -> Resting:
        name = rest.turn.request.trajectory
        home = self._sessions.home(name)
        engine = self._fleet.get(home.engine) if home else None
        return Resting(
            name=name,
            context=rest.context,
            since=rest.since,
            times=rest.times,
            home=home.engine if home else "",
            keys=bool(home and engine and str(engine.version) == home.version),
            shut_since=None if engine is None or engine.gate_open else engine.gate_since,
            view=lambda: self._view(rest.turn),
        )

    def _begin(self, rest: _Rest, engine: Engine) -> None:
        rest.times += 1
        rest.engine = engine
        rest.task = asyncio.create_task(self._warm(rest, engine))

    async def _warm(self, rest: _Rest, engine: Engine) -> None:
        request, version, rid = rest.turn.request, str(engine.version), self._new_rid()
        name, residents = request.trajectory, self._fleet.residents
        residents.begin_turn(engine.name, request.session, rest.context)
        whole = False
        try:
            body = _prefill(rest.turn, rid, version)
            target = Target.of(engine.update)
            last = _LastEvent()
            await self._client.stream(target, body, last.take)
            whole = last.whole
        except (LegLost, EngineRefused, BrokenStream):
            metrics.WARMED.labels(WarmOutcome.STOPPED).inc()
        finally:
            if not whole:
                self._fences.raise_for(engine, rid)
                residents.drop_session(request.session)
            if rest.engine is engine:
                rest.task = rest.engine = None
        if whole and str(engine.version) == version:
            metrics.WARMED.labels(WarmOutcome.UNUSED).inc(bool(rest.warm))  # of the times before
            metrics.WARMED_TOKENS.inc(rest.context)
            residents.end_turn(engine.name, request.session, rest.context, self._clock())
            self._sessions.settle(name, Home(engine.name, rest.context, version))
            rest.warm = engine.name


class _LastEvent:
    """What of a prefill's events is of interest.

    Attributes:
        whole: the last one said that it was done.
    """

    whole = False

    def take(self, events: Iterable[StreamEvent]) -> bool:
        """Look at some; true, as all are wanted."""
        for event in events:
            self.whole = event.finish is not None and not event.aborted
        return True


def _comes_back(turn: Turn) -> bool:
    """Whether another turn of the trajectory could be told from a new one, and may be moved."""
    request, finish = turn.request, turn.finish
    if not request.session or request.dedicated_because:
        return False
    return turn.state is TurnState.DONE and finish is not None and finish["type"] != "abort"


def _prefill(turn: Turn, rid: str, version: str) -> dict[str, object]:
    """One token after everything the trajectory holds; what else was asked belongs to turns."""
    kept = {
        name: turn.request.passed[name] for name in ("extra_key",) if name in turn.request.passed
    }
    asked = turn.request.but(passed=kept, sampling={"max_new_tokens": 1, "temperature": 0})
    return asked.leg_body(turn.transcript.context, 0, rid, version)
