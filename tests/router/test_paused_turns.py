"""Turns at closed gates queue for another engine, and stay until they have one; virtual time."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from rose_core.rollouts.capacity.fairness import work
from rose_core.rollouts.placement.views import PolicyName
from rose_core.rollouts.placement.watch import MoveReason
from rose_core.rollouts.terms import LeaseTerms
from rose_core.wire.routing import EngineKind
from rose_router.turns.turn import Turn
from tests.router.world import SimEngine, World, judge_whole, over, started, until, where, world

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

TURN_SECONDS = 20 * 0.05
"""What a turn of 20 tokens takes on an engine of ``world``."""


def own(cap: int = 1) -> SimEngine:
    return SimEngine("own", kind=EngineKind.DEDICATED, cap=cap)


def lent(cap: int = 1) -> SimEngine:
    return SimEngine("lent", cap=cap)


async def at_a_closed_gate(w: World, engine: SimEngine, others: int) -> tuple[Turn, list[Turn]]:
    """A turn that has begun there, and others that wait for the engine of the team's own.

    Returns:
        The turn, and the others.
    """
    w.gate(w.engines["own"], is_open=False)
    turn = w.ask(100, session="first")
    await started(turn)
    assert where(w, turn) is engine
    w.gate(engine, is_open=False)
    w.gate(w.engines["own"], is_open=True)
    return turn, [w.ask(20) for _ in range(others)]


@pytest.mark.parametrize("placement", [PolicyName.JOINT, PolicyName.LEAST_LOADED])
async def test_a_turn_at_a_closed_gate_goes_before_those_that_have_not_begun(
    placement: PolicyName,
) -> None:
    engine = lent()
    async with world(own(), engine, terms=LeaseTerms(placement=placement)) as w:
        turn, others = await at_a_closed_gate(w, engine, 40)
        closed = w.service.clock()
        await until(lambda: bool(turn.moves))
        assert 5.0 <= w.service.clock() - closed <= 5.0 + TURN_SECONDS + 0.3
        await over(turn)
        judge_whole(turn)
        assert [move.reason for move in turn.moves] == [MoveReason.PAUSED]
        assert sum(one.is_over for one in others) < 12
        for one in others:
            judge_whole(await over(one))


async def test_a_gate_that_opens_first_keeps_its_turn() -> None:
    engine = lent()
    async with world(own(), engine) as w:
        turn, _ = await at_a_closed_gate(w, engine, 0)
        long = w.ask(400)
        await started(long)
        await asyncio.sleep(8)
        w.gate(engine, is_open=True)
        judge_whole(await over(turn))
        judge_whole(await over(long))
        assert not turn.moves
        assert w.service.fleet.get("own").reserved == 0  # type: ignore[union-attr]


async def test_of_two_that_stand_the_older_goes_first() -> None:
    engine = lent(cap=2)
    async with world(own(), engine) as w:
        w.gate(w.engines["own"], is_open=False)
        turns = [w.ask(60, session=name) for name in ("old", "young")]
        for turn in turns:
            await started(turn)
        w.gate(engine, is_open=False)
        w.gate(w.engines["own"], is_open=True)
        others = [w.ask(20) for _ in range(20)]
        for turn in turns:
            judge_whole(await over(turn))
        moved = [turn.ended for turn in turns]
        assert moved == sorted(moved)
        assert all([m.reason for m in turn.moves] == [MoveReason.PAUSED] for turn in turns)
        for one in others:
            await over(one)


async def test_a_turn_that_ends_as_it_is_to_move_gives_back_all_that_was_kept_for_it() -> None:
    first, second = SimEngine("a", stop_at=8, linger=100), SimEngine("b", stop_at=8, linger=100)
    async with world(first, second) as w:
        turn = w.ask(20, session="first", job="team")
        await started(turn)
        left = where(w, turn)
        await until(lambda: turn.is_over)
        w.gate(left, is_open=False)
        await over(turn)
        assert not turn.moves
        assert [engine.reserved for engine in w.service.fleet] == [0, 0]
        other = second if left is first else first
        assert other.seen == []
        assert not w.service.fleet.residents._engines[other.name].used
        served = w.service.queue._shares._served["team"]
        assert served == pytest.approx(work(len(turn.request.prompt), 8))


async def test_an_abort_takes_a_turn_out_of_the_queue() -> None:
    engine = lent()
    async with world(own(), engine) as w:
        turn, others = await at_a_closed_gate(w, engine, 2)
        long = w.ask(200)
        await asyncio.sleep(6)
        w.service.leave(turn)
        await over(turn)
        assert turn.finish is not None
        assert turn.finish["type"] == "abort"
        for one in (*others, long):
            judge_whole(await over(one))
        assert w.service.fleet.get("own").reserved == 0  # type: ignore[union-attr]


async def test_a_turn_that_moves_is_charged_with_what_it_wrote_and_read() -> None:
    engine = lent()
    async with world(own(), engine) as w:
        w.service.ledger.totals.usual_tokens = 20.0  # fewer than it has written when it moves
        w.gate(w.engines["own"], is_open=False)
        turn = w.ask(100, job="a")
        await started(turn, 30)
        w.gate(engine, is_open=False)
        w.gate(w.engines["own"], is_open=True)
        judge_whole(await over(turn))
        assert [move.reason for move in turn.moves] == [MoveReason.PAUSED]
        read = 2 * len(turn.request.prompt) + turn.moves[0].at_token
        assert w.service.queue._shares._served["a"] == pytest.approx(work(read, 100))


async def test_an_engine_that_goes_on_without_its_owner_keeps_its_turns() -> None:
    engine = lent()
    async with world(own(), engine) as w:
        w.gate(w.engines["own"], is_open=False)
        turn = w.ask(200)
        await started(turn)
        w.detach(engine)
        w.gate(w.engines["own"], is_open=True)
        judge_whole(await over(turn))
        assert not turn.moves


async def test_all_who_wait_are_put_in_order_once_for_all_places_that_become_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = lent()
    async with world(own(), engine) as w:
        turn, _ = await at_a_closed_gate(w, engine, 0)
        long = w.ask(400)
        await started(long)
        others = [w.ask(20) for _ in range(50)]
        await asyncio.sleep(6)
        queue = w.service.queue
        everybody = Mock(side_effect=queue._everybody)
        monkeypatch.setattr(queue, "_everybody", everybody)
        w.attach(SimEngine("wide", kind=EngineKind.DEDICATED, cap=40))
        queue.pump()
        assert everybody.call_count == 1
        assert len(queue) == 50 - 39
        for one in (turn, long, *others):
            judge_whole(await over(one))


async def test_what_cannot_move_stays_at_its_gate() -> None:
    engine = own()
    async with world(engine) as w:
        turn = w.ask(20, dedicated_because=("hidden states",))
        await started(turn)
        w.gate(engine, is_open=False)
        w.attach(SimEngine("second", kind=EngineKind.DEDICATED))
        await asyncio.sleep(30)
        assert not turn.moves
        w.gate(engine, is_open=True)
        judge_whole(await over(turn))
