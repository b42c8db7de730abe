"""A call ends when who is called has fallen silent, and not before."""

from __future__ import annotations

import asyncio

import pytest

from rose_core.sandboxes.heartbeats import Heartbeats
from rose_wire.heartbeat import FellSilent, Heartbeat

BEATS = Heartbeats(every=0.01, within=0.05, most_missed=3)


class Other:
    """A process that answers as the test says."""

    def __init__(self, *answers: bool) -> None:
        self.answers, self.asked = list(answers), 0
        self.enough = asyncio.Event()

    async def ask(self) -> None:
        self.asked += 1
        if self.asked >= len(self.answers):
            self.enough.set()
        if not self.answers[min(self.asked, len(self.answers)) - 1]:
            await asyncio.Event().wait()


async def test_all_who_wait_for_a_process_that_fell_silent_are_let_go() -> None:
    other = Other(False)
    life = Heartbeat(other.ask, BEATS)

    async def wait() -> None:
        async with life.waited_for():
            await asyncio.Event().wait()

    result = await asyncio.gather(wait(), wait(), return_exceptions=True)
    assert [type(one) for one in result] == [FellSilent, FellSilent]
    assert other.asked == BEATS.most_missed, "asked once for both"


async def test_a_late_answer_in_between_counts() -> None:
    other = Other(False, False, True, False, False, True)
    async with Heartbeat(other.ask, BEATS).waited_for():
        await other.enough.wait()
    assert other.asked == 6


async def test_a_time_out_of_the_block_itself_is_not_taken_for_silence() -> None:
    with pytest.raises(TimeoutError) as raised:
        async with Heartbeat(Other(True).ask, BEATS).waited_for(), asyncio.timeout(0.05):
            await asyncio.Event().wait()
    assert not isinstance(raised.value, FellSilent)


async def test_one_that_was_silent_is_asked_before_it_is_waited_for_again() -> None:
    other = Other(False, False, False, False, True)
    life = Heartbeat(other.ask, BEATS)
    with pytest.raises(FellSilent):
        async with life.waited_for():
            await asyncio.Event().wait()
    with pytest.raises(FellSilent):
        async with life.waited_for():
            raise AssertionError("it was not begun")
    begun = False
    async with life.waited_for():
        begun = True
    assert begun
    assert other.asked == 5


async def test_a_process_that_cannot_be_reached_is_silent() -> None:
    async def ask() -> None:
        raise ConnectionRefusedError("no way")

    life = Heartbeat(ask, BEATS)
    assert not await life.answers()
    with pytest.raises(FellSilent):
        async with life.waited_for():
            await asyncio.Event().wait()
