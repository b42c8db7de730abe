"""Two engines of truly different speed: turns that read much and turns that write much part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from rose_demo.collect import classes
from rose_dev.waiting import until
from tests.router.conftest import Fake, Stage

pytestmark = pytest.mark.asyncio

Make = Callable[..., AbstractAsyncContextManager[Stage]]
LESSONS, TURNS = 6, 20


async def answered_by(s: Stage, prompt: int, output: int, seed: int) -> str:
    """The engine that answers a turn of that size, which the caller announces."""
    body = {
        "input_ids": [seed, *range(1, prompt)],
        "sampling_params": {"max_new_tokens": output, "temperature": 0},
        "rose": {"expected_tokens": output},
    }
    async with s.post("/generate", body) as reply:
        answer = await reply.json()
    engines: list[dict[str, str]] = answer["meta_info"]["rose"]["engines"]
    return engines[0]["engine"]


async def reads(s: Stage, seed: int) -> str:
    return await answered_by(s, 400, 2, 1000 + seed)


async def writes(s: Stage, seed: int) -> str:
    return await answered_by(s, 4, 60, 5000 + seed)


async def learned(s: Stage, engine: Fake, seed: int) -> None:
    """Turns of both sizes on this engine alone, so that the router measures it."""
    engine.owner.send(gate_open=True)
    await until(s.router.service.fleet.has_room)
    for number in range(LESSONS):
        await reads(s, seed + number)
        await writes(s, seed + number)
    engine.owner.send(gate_open=False)
    await until(lambda: not s.router.service.fleet.has_room())


async def test_reading_goes_to_fast_prefill_and_writing_to_fast_steps(stage: Make) -> None:
    async with stage() as s:
        compute = await s.engine(
            "compute",
            token_seconds=0.02,
            prefill_token_seconds=0.00001,
            gate_open=False,
            device_class="h200",
        )
        memory = await s.engine(
            "memory",
            token_seconds=0.002,
            prefill_token_seconds=0.002,
            gate_open=False,
            device_class="l4",
        )
        await learned(s, compute, 0)
        await learned(s, memory, 100)
        for one in (compute, memory):
            one.owner.send(gate_open=True)
        await until(lambda: all(engine.gate_open for engine in s.router.service.fleet))
        read = Counter([await reads(s, 200 + number) for number in range(TURNS)])
        written = Counter([await writes(s, 300 + number) for number in range(TURNS)])
        speeds = s.router.service.fleet.by_class
        async with s.http.get(f"{s.url}/metrics") as reply:
            counted = classes(await reply.text())
        pages = {one["engine"]: one["device_class"] for one in (await s.get("/engines"))["engines"]}
    # A few turns are placed at random, to learn.
    assert read["compute"] >= TURNS - 3, read
    assert written["memory"] >= TURNS - 3, written
    assert pages == {"compute": "h200", "memory": "l4"}
    # Counters of a process: other tests of it may have added to them.
    assert counted["h200"].read > counted["l4"].read
    assert counted["l4"].written > counted["h200"].written
    assert min(counted["h200"].turns, counted["l4"].turns) >= 2 * LESSONS
    assert counted["h200"].step_s == pytest.approx(speeds["h200"].step_seconds)
    assert speeds["h200"].step_seconds > speeds["l4"].step_seconds
    assert speeds["h200"].prefill_seconds_per_token < speeds["l4"].prefill_seconds_per_token


async def test_an_engine_that_was_never_seen_is_expected_to_be_as_its_class(stage: Make) -> None:
    async with stage() as s:
        await s.engine("old", token_seconds=0.03, device_class="l4")
        for number in range(LESSONS):
            await writes(s, number)
        await s.engine("new", device_class="l4")
        await s.engine("other", device_class="h200")
        fleet = s.router.service.fleet
        expected = {one.name: fleet.expected(one).step_seconds for one in fleet}
        assert expected["new"] == fleet.by_class["l4"].step_seconds
        assert expected["other"] == fleet.usual.step_seconds


async def test_what_a_guard_has_measured_of_co_running_is_placements_and_on_the_page(
    stage: Make,
) -> None:
    async with stage() as s:
        await s.engine("old")
        await s.engine("measured", slowdown=1.3)
        views = {one.name: one.slowdown for one in s.router.service.fleet.views()}
        page = (await s.get("/engines"))["engines"]
    assert views == {"old": 0.0, "measured": 1.3}
    found = {one["engine"]: one["serving_slowdown"] for one in page}
    assert found == {"old": None, "measured": 1.3}
