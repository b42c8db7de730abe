"""The guard's tick in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rose_agent.guard.loop import Ticker

pytestmark = pytest.mark.looptime


def _nothing() -> bool:
    return False


async def steps_beside(
    beats_s: list[float],
    seconds: float,
    period: float = 0.045,
    *,
    resting: bool = False,
    stirred_s: float = 0.0,
) -> list[float]:
    """When steps are made while somebody beats at these times."""
    loop, made = asyncio.get_running_loop(), list[float]()
    began = loop.time()

    def step() -> bool:
        made.append(round(loop.time() - began, 3))
        return resting

    pulse = Ticker(step, period)
    task = asyncio.create_task(pulse.run())
    for moment in beats_s:
        loop.call_later(moment, pulse.beat)
    if stirred_s:
        loop.call_later(stirred_s, pulse.stir)
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return made


async def test_a_beat_says_whether_it_stepped() -> None:
    pulse = Ticker(_nothing, 0.045)
    assert not pulse.beat(), "it does not run yet"
    task = asyncio.create_task(pulse.run())
    await asyncio.sleep(0.03)
    assert [pulse.beat(), pulse.beat()] == [True, False]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_a_tap_the_timer_steps() -> None:
    assert await steps_beside([], 0.14) == [0.0, 0.045, 0.09, 0.135]


async def test_a_regular_heartbeat_is_the_only_waking() -> None:
    beats = [0.04, 0.08, 0.12, 0.16]
    assert await steps_beside(beats, 0.17) == [0.0, *beats]


async def test_heartbeats_of_many_taps_make_no_more_steps() -> None:
    beats = [0.04 * turn + 0.001 * number for turn in range(1, 4) for number in range(8)]
    assert await steps_beside(beats, 0.125) == [0.0, 0.04, 0.08, 0.12]


async def test_a_tap_that_falls_silent_is_stepped_in_for() -> None:
    assert await steps_beside([0.04], 0.14) == [0.0, 0.04, 0.085, 0.13]


async def test_at_rest_every_second_step_is_enough() -> None:
    assert await steps_beside([], 0.2, resting=True) == [0.0, 0.09, 0.18]
    beats = [0.04 * turn for turn in range(1, 6)]
    assert await steps_beside(beats, 0.21, resting=True) == [0.0, 0.08, 0.16]


async def test_whoever_stirs_at_rest_is_stepped_for_within_a_period() -> None:
    assert await steps_beside([], 0.11, resting=True, stirred_s=0.02) == [0.0, 0.065]


async def test_a_step_that_fails_ends_the_guard() -> None:
    def fail() -> bool:
        raise RuntimeError("a step")

    with pytest.raises(RuntimeError, match="a step"):
        await Ticker(fail, 0.045).run()
