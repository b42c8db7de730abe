"""A turn that ends engines ends few of them: it goes alone, then nowhere; others are not blamed."""

from __future__ import annotations

import asyncio

import pytest

from rose_core.rollouts.errors import UnsafeTurn
from rose_core.wire.routing import EngineKind
from rose_router.errors import EngineRefused, Unprocessable
from rose_router.turns.turn import TurnState
from tests.router.world import SimEngine, judge_whole, over, started, two, until, where, world

POISON = 666


def fleet(count: int, **fields: object) -> list[SimEngine]:
    return [SimEngine(name, **fields) for name in "abcdef"[:count]]  # type: ignore[arg-type]


async def test_a_turn_that_ends_its_engine_ends_one_more_at_most() -> None:
    async with world(*fleet(6, dies_of=POISON)) as w:
        turn = await over(w.ask(prompt=(1, POISON)))
        assert turn.state is TurnState.FAILED
        assert isinstance(turn.error, Unprocessable)
        assert turn.error.status == 422
        dead = [engine.name for engine in w.engines.values() if not engine.alive]
        assert len(dead) == 2
        assert all(name in str(turn.error).split(" ended")[0] for name in dead)


async def test_the_second_time_it_runs_beside_nobody_and_others_finish() -> None:
    async with world(*fleet(4, dies_of=POISON)) as w:
        others = [w.ask(30) for _ in range(8)]
        for turn in others:
            await started(turn, 2)
        poison = await over(w.ask(prompt=(1, POISON)))
        assert poison.state is TurnState.FAILED
        dead = [engine for engine in w.engines.values() if not engine.alive]
        assert len(dead) == 2
        # Where it ran alone no other turn was lost.
        for turn in others:
            judge_whole(await over(turn))
            assert turn.losses <= 1


async def test_turns_that_had_tokens_are_not_held_up_by_the_death_of_their_engine() -> None:
    async with world(*two(token_seconds=0.05)) as w:
        turns = [w.ask(40) for _ in range(4)]
        for turn in turns:
            await started(turn)
        w.kill(where(w, turns[0]))
        for turn in turns:
            judge_whole(await over(turn))
            assert not turn.record.deaths


async def test_a_suspect_is_cleared_by_its_next_token_and_shares_the_engine_again() -> None:
    async with world(*two(token_seconds=0.05)) as w:
        first = w.ask(40)
        await until(lambda: first.leg is not None)
        w.kill(where(w, first))
        await started(first, 1)
        assert where(w, first).alive
        other = w.ask(5)
        judge_whole(await over(other))
        assert not first.is_over
        judge_whole(await over(first))


async def test_no_turn_begins_beside_a_suspect_that_has_no_token_yet() -> None:
    slow = SimEngine("slow", token_seconds=5.0)
    async with world(SimEngine("quick", dies_of=POISON), slow) as w:
        w.gate(slow, is_open=False)
        suspect = w.ask(3, prompt=(1, POISON))
        await until(suspect.record.must_be_alone)
        w.gate(slow, is_open=True)
        await until(lambda: suspect.leg is not None)
        other = w.ask(3)
        await asyncio.sleep(2)
        assert other.leg is None
        judge_whole(await over(suspect))
        judge_whole(await over(other))


async def test_a_process_that_ends_under_a_closed_gate_casts_no_suspicion() -> None:
    async with world(*two()) as w:
        turn = w.ask(20)
        await until(lambda: turn.leg is not None)
        engine = where(w, turn)
        w.gate(engine, is_open=False)
        await asyncio.sleep(1)
        engine.frozen = False
        w.kill(engine)
        judge_whole(await over(turn))
        assert turn.record.deaths == 0


async def test_a_failure_that_is_the_requests_own_costs_no_engine_its_turns() -> None:
    async with world(*fleet(2, fails_at=POISON)) as w:
        turn = await over(w.ask(prompt=(1, POISON)))
        assert isinstance(turn.error, EngineRefused)
        assert turn.losses == 0
        now = w.service.clock()
        assert all(engine.backing_off_until <= now for engine in w.service.fleet)


async def test_a_failure_of_an_engine_that_fails_at_everything_is_its_own() -> None:
    broken = SimEngine("broken", fails_at=0, cap=4)
    async with world(broken, SimEngine("whole", kind=EngineKind.DEDICATED, cap=1)) as w:
        turns = [w.ask(5, prompt=(0, 1, 2)) for _ in range(3)]
        for turn in turns:
            judge_whole(await over(turn))


async def test_a_turn_that_came_before_any_engine_is_held_to_the_bounds_of_the_first() -> None:
    async with world() as w:
        turn = w.ask(prompt=(1, POISON))
        engine = SimEngine("a", vocabulary=500, dies_of=POISON)
        w.attach(engine)
        assert isinstance((await over(turn)).error, UnsafeTurn)
        assert engine.alive
        assert not engine.seen


async def test_an_id_beyond_an_engines_vocabulary_is_never_sent_there() -> None:
    async with world(*two(vocabulary=500, dies_of=POISON)) as w:
        with pytest.raises(UnsafeTurn, match="token id 666"):
            w.ask(prompt=(1, POISON))
        assert all(engine.alive and not engine.seen for engine in w.engines.values())
