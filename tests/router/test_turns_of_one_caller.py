"""A turn that nobody can join runs in its caller's task, whose end and the turn's are two things.

Virtual time throughout.
"""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from rose_core.rollouts.placement.watch import MoveReason
from rose_core.rollouts.transcripts.transcript import Leg
from rose_router import metrics
from rose_router.turns.request import TurnRequest
from rose_router.turns.service import Service
from rose_router.turns.turn import Turn, TurnMove, TurnState
from tests.router.world import SimEngine, World, over, until, world

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def submitted(w: World, *, own_rid: bool = False, session: str = "") -> Turn:
    request = TurnRequest("r", (1, 2, 3), {"max_new_tokens": 20}, own_rid=own_rid, session=session)
    return w.service.submit(request, alone=True)


def finish(turn: Turn) -> str:
    return str(turn.finish and turn.finish["type"])


async def waited_for(w: World, turn: Turn) -> asyncio.Task[None]:
    """Its caller, once there are tokens."""

    async def call() -> None:
        await w.service.until_ended(turn)
        await asyncio.sleep(0)  # as where the answer is written

    caller = asyncio.create_task(call())
    await until(lambda: turn.leg is not None and turn.leg.placed > 2)
    return caller


async def test_it_has_no_task_beside_its_callers() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w)
        caller = await waited_for(w, turn)
        assert turn.task is caller
        await caller
        assert finish(turn) == "length"
        assert turn.held == 20


class Answer:
    """What its caller's task returns, with the request and its body."""


async def test_one_that_is_kept_for_the_next_keeps_nothing_of_its_callers() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w, session="s")

        async def call() -> Answer:
            await w.service.until_ended(turn)
            return Answer()

        answer = weakref.ref(await asyncio.create_task(call()))
        await asyncio.sleep(0.01)  # the loop still has the task in hand that has just ended
        gc.collect()
        assert turn.is_over
        assert answer() is None


async def test_its_end_comes_once_however_often_it_is_waited_for() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w)
        for _ in range(2):
            await w.service.until_ended(turn)
        assert w.service.ledger.totals.turns == 1


async def test_one_with_an_id_outlives_its_first_caller() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w, own_rid=True)
        caller = await waited_for(w, turn)
        assert turn.task is not caller
        assert submitted(w, own_rid=True) is turn
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        w.service.leave(turn)
        assert (await over(turn)).finish == {"type": "length", "length": 20}


async def test_who_hangs_up_ends_it_and_his_own_task() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w)
        caller = await waited_for(w, turn)
        before = metrics.UNDELIVERED._value.get()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert turn.finish is not None
        assert (turn.finish["type"], turn.finish["message"]) == ("abort", "the caller hung up")
        assert not len(w.service.ledger)
        assert metrics.UNDELIVERED._value.get() - before == turn.held > 2
        await until(lambda: bool(w.engines["a"].aborted))


async def test_who_ends_it_leaves_its_caller_his_answer() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w)
        caller = await waited_for(w, turn)
        for _ in range(2):  # two may ask for it
            w.service.abort_all()
        await caller
        assert finish(turn) == "abort"
        assert caller.cancelling() == 0
        assert not turn.abandoned


async def test_who_hangs_up_as_it_is_ended_gets_no_answer() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w)
        caller = await waited_for(w, turn)
        w.service.abort_all()
        asyncio.get_running_loop().call_soon(caller.cancel)
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert turn.abandoned


class AbortsAtItsLegsEnd:
    """Ends all turns in the step in which this one ends by itself."""

    traceparent = ""

    def __init__(self, service: Service) -> None:
        self._service = service

    def begin_leg(self, leg: Leg) -> None:
        pass

    def see_version(self, version: str) -> None:
        pass

    def end_leg(self, leg: Leg) -> None:
        assert leg.complete
        assert self._service.abort_all() == 1

    def move(self, move: TurnMove) -> None:
        pass

    def end(self, turn: Turn) -> None:
        pass


async def test_what_comes_too_late_to_end_it_does_not_end_its_callers_answer() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w)
        caller = await waited_for(w, turn)
        turn.trace = AbortsAtItsLegsEnd(w.service)
        await caller
        assert finish(turn) == "length"


async def test_one_that_is_left_before_it_began_ends() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w)
        w.service.leave(turn)
        await over(turn)
        assert turn.state is TurnState.DONE
        assert not len(w.service.ledger)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "closed"])
async def test_one_that_loses_its_engine_goes_on_elsewhere(*, killed: bool) -> None:
    async with world(SimEngine("a"), SimEngine("b")) as w:
        turn = submitted(w)
        caller = await waited_for(w, turn)
        assert turn.leg is not None
        engine = w.engines[turn.leg.engine]
        if killed:
            w.kill(engine)
        else:  # then its leg is cancelled, and with it the caller's task
            w.gate(engine, is_open=False)
        await caller
        assert finish(turn) == "length"
        assert len(turn.moves) == 1
        assert turn.held == 20
        assert caller.cancelling() == 0


async def test_time_that_runs_out_as_its_leg_moves_is_its_callers_to_hear_of() -> None:
    async with world(SimEngine("a"), SimEngine("b")) as w:
        turn = submitted(w)

        async def call() -> None:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(0.5) as limit:
                due = limit.when()
                assert due is not None
                loop.call_at(due, move)  # in the same round of the loop
                await w.service.until_ended(turn)

        def move() -> None:
            for engine in w.service.fleet:
                for leg in engine.legs.values():
                    leg.end(MoveReason.PAUSED)

        caller = asyncio.create_task(call())
        with pytest.raises(TimeoutError):
            await caller
        assert caller.cancelling() == 0
        assert turn.abandoned
        assert finish(turn) == "abort"
        assert [engine.reserved for engine in w.service.fleet] == [0, 0]


async def test_a_router_that_stops_answers_its_caller() -> None:
    async with world(SimEngine("a")) as w:
        turn = submitted(w)
        caller = await waited_for(w, turn)
        await w.service.close()
        await caller
        assert finish(turn) == "abort"
        assert turn.finish is not None
        assert turn.finish["message"] == "the router stops"
