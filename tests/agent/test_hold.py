"""What the guard believes of its hold while answers are late, fail or cross a change of mind."""

from __future__ import annotations

import asyncio
import time

import pytest

from rose_agent.guard.slots.hold import Calls, ConfirmedHold, Hold
from rose_core.guard.ladder import LadderLimits
from rose_core.wire.host import Accepted
from rose_wire.errors import Unavailable

PAUSED_US, TURNS = 700, 3


class Host:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.ended: list[str] = []
        self.stopped: list[ConfirmedHold] = []
        self._answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self.hold = Hold(Calls(self.ended.append), self._ask, self.stopped.append)

    async def _ask(self, hold: bool) -> Accepted:
        self.asked.append(hold)
        return await self._answer

    async def answer(self, error: Exception | None = None) -> None:
        """Answer the call under way; later ones wait again."""
        await turns()
        answer, self._answer = self._answer, asyncio.get_running_loop().create_future()
        if error is None:
            answer.set_result(Accepted(PAUSED_US, TURNS))
        else:
            answer.set_exception(error)
        await turns()


async def turns() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_hold_is_believed_once_the_host_has_answered() -> None:
    host = Host()
    host.hold.order(hold=True)
    await turns()
    assert (host.hold.confirmed, host.hold.is_pending) == (None, True)
    await host.answer()
    assert (host.hold.confirmed, host.hold.is_pending) == (True, False)
    assert host.ended == [""]


async def test_a_repeated_order_makes_no_second_call() -> None:
    host = Host()
    for _ in range(3):
        host.hold.order(hold=True)
        await turns()
    assert host.asked == [True]


async def test_a_change_of_mind_does_not_wait_for_the_answer() -> None:
    host = Host()
    host.hold.order(hold=True)
    await turns()
    host.hold.order(hold=False)
    await turns()
    assert host.asked == [True, False]


async def test_the_reaction_to_a_request_is_told_from_its_arrival() -> None:
    host = Host()
    host.hold.order(hold=True, arrival_ns=1)
    await host.answer()
    (stopped,) = host.stopped
    assert (stopped.arrival_ns, stopped.paused_us, stopped.turns) == (1, PAUSED_US, TURNS)
    assert stopped.after_ns == stopped.confirmed_ns - 1


async def test_a_stop_that_outlasts_its_request_counts_for_as_long_as_it_was_waited_for() -> None:
    host = Host()
    arrived_ns = time.monotonic_ns()
    host.hold.order(hold=True, arrival_ns=arrived_ns)
    await turns()
    host.hold.order(hold=False)
    (stopped,) = host.stopped
    assert (stopped.arrival_ns, stopped.answered, stopped.turns) == (arrived_ns, False, None)
    assert 0 < stopped.after_ns <= LadderLimits().hold_ns


async def test_a_stop_that_the_guard_had_to_make_itself_counts_as_its_patience() -> None:
    host = Host()
    host.hold.order(hold=True, arrival_ns=1)
    await turns()
    host.hold.order(hold=False)
    assert [one.after_ns for one in host.stopped] == [LadderLimits().hold_ns]


async def test_a_stop_that_was_answered_or_that_the_list_shows_is_not_given_up() -> None:
    host = Host()
    host.hold.order(hold=True, arrival_ns=1)
    await host.answer()
    host.hold.order(hold=False)
    await host.answer()
    host.hold.order(hold=True, arrival_ns=2)
    await host.answer(Unavailable("gone"))
    host.hold.believe(held=True, asked_ns=1 << 62)
    host.hold.order(hold=False)
    assert [(one.arrival_ns, one.answered) for one in host.stopped] == [(1, True)]


async def test_what_a_new_host_confirms_is_no_reaction_to_the_request_of_before() -> None:
    host = Host()
    host.hold.order(hold=True, arrival_ns=1)
    await host.answer()
    host.hold.forget()
    host.hold.order(hold=True)
    await host.answer()
    assert host.hold.confirmed is True
    assert len(host.stopped) == 1


async def test_a_failed_call_is_told_and_made_again_by_the_next_order() -> None:
    host = Host()
    host.hold.order(hold=True)
    await host.answer(Unavailable("gone"))
    assert host.ended == ["hold: gone"]
    assert host.hold.confirmed is None
    host.hold.order(hold=True)
    await host.answer()
    assert host.hold.confirmed is True


@pytest.mark.parametrize("held", [True, False])
async def test_the_hosts_list_corrects_only_what_is_older_than_it(held: bool) -> None:
    host = Host()
    host.hold.order(hold=not held)
    host.hold.believe(held=held, asked_ns=1)
    assert host.hold.confirmed is None, "a call is under way"
    await host.answer()
    host.hold.believe(held=held, asked_ns=1)
    assert host.hold.confirmed is not held, "the list is older than the answer"
    host.hold.believe(held=held, asked_ns=1 << 62)
    assert host.hold.confirmed is held


async def test_what_another_host_process_confirmed_is_asked_again() -> None:
    host = Host()
    host.hold.order(hold=True)
    await host.answer()
    host.hold.forget()
    assert host.hold.is_pending
    host.hold.order(hold=True)
    await turns()
    assert host.asked == [True, True]
