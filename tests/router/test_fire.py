"""Hundreds of turns while engines die, pause, leave, come back and change weights at random.

Virtual time: minutes of trouble in a second. Every turn must end exactly once, every token must be
what the version of its span makes of the prefix, and nothing may be left behind.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from rose_core.rollouts.admission import Queue
from rose_core.rollouts.placement import Policy
from rose_core.wire.routing import EngineKind
from rose_router.turn import State, Turn
from tests.router.world import SimEngine, V, World, judge, judge_whole, over, world

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

TURNS = 500


class Trouble:
    """Does something bad every moment, and repairs it later."""

    def __init__(self, w: World, chance: random.Random) -> None:
        self._w = w
        self._chance = chance
        self.head = 0
        self.count = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(0.05, 0.4))
            engine = self._chance.choice(list(self._w.engines.values()))
            if not engine.alive or not engine.gate_open:
                continue
            self.count += 1
            deed = self._chance.choice([self._kill, self._pause, self._leave, self._commit])
            deed(engine)

    def _later(self, seconds: float, engine: SimEngine) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, lambda: self._w.revive(engine, V(self.head)))

    def _kill(self, engine: SimEngine) -> None:
        self._w.kill(engine)
        self._later(self._chance.uniform(1, 10), engine)

    def _pause(self, engine: SimEngine) -> None:
        self._w.gate(engine, is_open=False)
        seconds = self._chance.choice([0.3, 2, 8])
        asyncio.get_running_loop().call_later(seconds, self._wake, engine)

    def _wake(self, engine: SimEngine) -> None:
        if engine.alive:
            self._w.gate(engine, is_open=True)

    def _leave(self, engine: SimEngine) -> None:
        if engine.kind is EngineKind.DEDICATED:
            return
        engine.leaving, engine.gate_open = True, False
        self._w.tell(engine)
        asyncio.get_running_loop().call_later(3, self._return, engine)

    def _return(self, engine: SimEngine) -> None:
        engine.leaving = False
        self._w.detach(engine)
        engine.runs.clear()
        self._w.attach(engine)
        self._w.revive(engine, V(self.head))

    def _commit(self, engine: SimEngine) -> None:
        self.head += self._chance.random() < 0.3
        self._w.commit(engine, V(self.head))


async def _caller(w: World, chance: random.Random, number: int) -> Turn:
    await asyncio.sleep(chance.uniform(0, 30))
    turn = w.ask(chance.randint(1, 60), session=f"s{number % 40}")
    if chance.random() < 0.1:
        await asyncio.sleep(chance.uniform(0, 2))
        w.service.leave(turn)  # hangs up
    return await over(turn)


@pytest.mark.parametrize(("seed", "spans_always"), [(1, True), (2, True), (3, False)])
async def test_every_turn_ends_once_and_every_token_is_right(seed: int, spans_always: bool) -> None:
    chance = random.Random(seed)
    engines = [
        SimEngine(
            f"e{i}",
            kind=EngineKind.DEDICATED if i == 0 else EngineKind.BORROWED,
            cap=chance.randint(2, 8),
            incremental=bool(i % 2),
            spans_always=spans_always,
            token_seconds=chance.choice([0.01, 0.02, 0.05]),
        )
        for i in range(6)
    ]
    async with world(
        *engines, policy=Policy(max_staleness=3), queue=Queue(seconds=1000), max_losses=1000
    ) as w:
        trouble = Trouble(w, chance)
        task = asyncio.create_task(trouble.run())
        turns = await asyncio.gather(*(_caller(w, chance, n) for n in range(TURNS)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        hung_up = [turn for turn in turns if turn.listeners == 0 and turn.finish is not None]
        for turn in turns:
            assert turn.state is State.DONE, turn.error
            assert turn.finish is not None
            if turn.finish["type"] == "abort":
                assert turn in hung_up
                judge(turn)
            else:
                judge_whole(turn)

        totals = w.service.ledger.totals
        assert trouble.count > 20
        assert totals.turns == TURNS
        assert totals.moves > 10
        assert totals.tokens == sum(turn.held for turn in turns)
        assert len(w.service.ledger) == len(w.service.room) == 0
        assert all(not engine.legs and engine.reserved == 0 for engine in w.service.fleet)
        rids = [body["rid"] for engine in engines for body in engine.seen]
        assert len(rids) == len(set(rids))
