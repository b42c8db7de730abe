"""The guard's tick in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rose_agent.guard.pulse import Pulse

pytestmark = pytest.mark.looptime


async def steps_beside(beats_s: list[float], seconds: float, period: float = 0.045) -> list[float]:
    """When steps are made while somebody beats at these times."""
    loop, made = asyncio.get_running_loop(), list[float]()
    began = loop.time()
    pulse = Pulse(lambda: made.append(round(loop.time() - began, 3)), period)
    task = asyncio.create_task(pulse.run())
    for moment in beats_s:
        loop.call_later(moment, pulse.beat)
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return made


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


async def test_a_step_that_fails_ends_the_guard() -> None:
    def fail() -> None:
        raise RuntimeError("a step")

    with pytest.raises(RuntimeError, match="a step"):
        await Pulse(fail, 0.045).run()
