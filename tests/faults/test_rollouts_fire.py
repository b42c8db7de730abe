"""Correctness under fire: everything that can go wrong with engines and callers, all at once.

Two leases with fleets of their own, on virtual time, seeded. Engines are killed, paused, taken
back, given new weights and smaller caps; callers hang up, abort, ask twice under one id, and hold
turns back. Every turn ends exactly once, spans cover every token, every token is what its version
makes of the prefix before it (without new weights: what an undisturbed run gives), nothing crosses
from one lease into the other, and nothing is left behind.

``ROSE_FIRE_TURNS`` sets the number of turns (default 600 over both leases).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from rose_core.rollouts.capacity.admission import QueueLimits
from rose_core.rollouts.terms import LeaseTerms
from rose_core.wire.routing import EngineKind
from rose_router.errors import BadRequest
from rose_router.turns.turn import Turn, TurnState
from tests.router.world import SimEngine, V, World, greedy, judge, judge_whole, over, world

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

TURNS = int(os.environ.get("ROSE_FIRE_TURNS", "600"))
SPAN_SECONDS = TURNS / 25


class Fire:
    """Does something bad to a random engine every moment, and repairs it later."""

    def __init__(self, w: World, chance: random.Random, *, commits: bool) -> None:
        self._w = w
        self._chance = chance
        self._head = 0
        self.deeds: Counter[str] = Counter()
        self._choices = [self.kill, self.pause, self.revoke, self.cut_cap, self.hold]
        self._choices += [self.commit] if commits else []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(0.05, 0.4))
            engine = self._chance.choice(list(self._w.engines.values()))
            if engine.alive and engine.gate_open:
                deed = self._chance.choice(self._choices)
                self.deeds[deed.__name__] += 1
                deed(engine)

    def _later(self, seconds: float, deed: object, *arguments: object) -> None:
        asyncio.get_running_loop().call_later(seconds, deed, *arguments)  # type: ignore[arg-type]

    def kill(self, engine: SimEngine) -> None:
        self._w.kill(engine)
        self._later(self._chance.uniform(1, 6), self._revive, engine)

    def _revive(self, engine: SimEngine) -> None:
        self._w.revive(engine, V(self._head))

    def pause(self, engine: SimEngine) -> None:
        self._w.gate(engine, is_open=False)
        self._later(self._chance.choice([0.3, 2, 8]), self._wake, engine)

    def _wake(self, engine: SimEngine) -> None:
        if engine.alive:
            self._w.gate(engine, is_open=True)

    def revoke(self, engine: SimEngine) -> None:
        if engine.kind is EngineKind.DEDICATED:
            return
        engine.leaving, engine.gate_open = True, False
        self._w.update_engine(engine)
        self._later(3, self._return, engine)

    def _return(self, engine: SimEngine) -> None:
        engine.leaving = False
        self._w.detach(engine)
        engine.runs.clear()
        self._w.attach(engine)
        self._revive(engine)

    def cut_cap(self, engine: SimEngine) -> None:
        whole, engine.cap = engine.cap, 1
        self._w.update_engine(engine)
        self._later(2, self._restore, engine, whole)

    def _restore(self, engine: SimEngine, cap: int) -> None:
        engine.cap = max(engine.cap, cap)
        self._w.update_engine(engine)

    def hold(self, _engine: SimEngine) -> None:
        self._w.service.queue.hold()
        self._later(self._chance.uniform(0.1, 1), self._w.service.queue.release)

    def commit(self, engine: SimEngine) -> None:
        self._head += self._chance.random() < 0.2
        self._w.commit(engine, V(self._head))


async def caller(w: World, chance: random.Random, number: int) -> tuple[str, Turn]:
    """One caller; what it did and its turn."""
    await asyncio.sleep(chance.uniform(0, SPAN_SECONDS))
    manner = chance.choices(["waits", "hangs up", "aborts", "asks twice"], [80, 7, 6, 7])[0]
    own = manner in {"aborts", "asks twice"}
    request = {"rid": f"mine-{number}", "own_rid": True} if own else {}
    session = f"s{number % 40}" if chance.random() < 0.7 else ""
    most = chance.randint(1, 30)
    prompt = (number, 7, number % 13)
    turn = w.ask(most, prompt=prompt, session=session, **request)
    if manner == "asks twice":
        await asyncio.sleep(chance.uniform(0, 1))
        assert w.ask(most, prompt=prompt, session=session, **request) is turn
        if not turn.is_over:
            with pytest.raises(BadRequest):
                w.ask(most + 1, prompt=prompt, **request)
        w.service.leave(turn)
    elif manner != "waits":
        await asyncio.sleep(chance.uniform(0, 1))
        if manner == "hangs up":
            w.service.leave(turn)
        else:
            w.service.abort(turn.request.rid)
    return manner, await over(turn)


def fleet(lease: int, chance: random.Random, *, commits: bool) -> list[SimEngine]:
    return [
        SimEngine(
            f"l{lease}e{number}",
            kind=EngineKind.DEDICATED if number == 0 else EngineKind.BORROWED,
            cap=chance.randint(2, 8),
            incremental=bool(number % 2),
            spans_always=commits or number % 3 > 0,
            token_seconds=chance.choice([0.01, 0.02, 0.05]),
        )
        for number in range(5)
    ]


def judged(manner: str, turn: Turn, *, commits: bool) -> None:
    assert turn.state is TurnState.DONE, turn.error
    assert turn.finish is not None
    if turn.finish["type"] == "abort":
        assert manner in {"hangs up", "aborts"}, turn.finish
        judge(turn)
        return
    judge_whole(turn)
    if not commits:
        assert turn.transcript.tokens == greedy(turn)


def turns_alive() -> int:
    """Turns that somebody still holds."""
    gc.collect()
    return sum(type(one) is Turn for one in gc.get_objects())


@pytest.mark.parametrize(("seed", "commits"), [(1, False), (2, True)])
async def test_whatever_happens_every_turn_ends_once_and_right(seed: int, commits: bool) -> None:
    tasks_before, turns_before = len(asyncio.all_tasks()), turns_alive()
    await burn(random.Random(seed), commits=commits)
    await asyncio.sleep(10)  # repairs that are still to come
    assert len(asyncio.all_tasks()) == tasks_before
    assert turns_alive() <= turns_before, "other tests may have left some, this one may not"


async def burn(chance: random.Random, *, commits: bool) -> None:
    leases = [fleet(lease, chance, commits=commits) for lease in (0, 1)]
    async with AsyncExitStack() as stack:
        worlds = []
        for engines in leases:
            made = world(
                *engines,
                max_losses=1000,
                terms=LeaseTerms(max_staleness=3),
                queue=QueueLimits(seconds=1000),
            )
            worlds.append(await stack.enter_async_context(made))
        fires = [Fire(w, chance, commits=commits) for w in worlds]
        burning = [asyncio.create_task(fire.run()) for fire in fires]
        callers = (caller(worlds[n % 2], chance, n) for n in range(TURNS))
        ended = await asyncio.gather(*callers)
        for task in burning:
            task.cancel()
        await asyncio.gather(*burning, return_exceptions=True)

        for manner, turn in ended:
            judged(manner, turn, commits=commits)
        deeds = fires[0].deeds + fires[1].deeds
        assert min(deeds[word] for word in ("kill", "pause", "revoke", "cut_cap", "hold")) > 3
        assert sum(w.service.ledger.totals.turns for w in worlds) == TURNS
        assert sum(w.service.ledger.totals.moves for w in worlds) > 20
        for lease, w in enumerate(worlds):
            nothing_is_left(w)
            no_cross_talk(lease, leases)


def nothing_is_left(w: World) -> None:
    service = w.service
    assert len(service.ledger) == len(service.queue) == 0
    assert all(not engine.legs and engine.reserved == 0 for engine in service.fleet)
    assert all(not trajectory.live for trajectory in service.prospects._trajectories.values())
    rids = [body["rid"] for engine in w.engines.values() for body in engine.seen]
    assert len(rids) == len(set(rids))


def no_cross_talk(lease: int, leases: list[list[SimEngine]]) -> None:
    ours = {engine.name for engine in leases[lease]}
    prompts = {body["input_ids"][0] % 2 for engine in leases[lease] for body in engine.seen}
    assert prompts == {lease}
    assert all(name.startswith(f"l{lease}") for name in ours)
