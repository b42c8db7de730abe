"""A serving pod waits until the node's engine host says that its GPUs are free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import msgspec
import pytest
from aiohttp import web

from rose_agent.host.vacancy.holders import GpuHolder, Vacancy, judge, page
from rose_agent.host.vacancy.vacate import VacateOptions, main, visible_gpus, wait
from rose_core.wire.host import EngineState

MINE, OTHER = "GPU-mine", "GPU-other"


def engine(*gpus: str, state: EngineState = EngineState.SERVING) -> GpuHolder:
    return GpuHolder("lease-a-0", state.value, gpus)


@pytest.mark.parametrize(
    ("holding", "free"),
    [
        (engine(MINE), False),
        (engine(OTHER), True),
        (engine(OTHER, MINE), False),
        (engine(), False),
        (engine(MINE, state=EngineState.DORMANT), False),
        (engine(MINE, state=EngineState.STOPPING), False),
        (engine(MINE, state=EngineState.GONE), True),
    ],
    ids=["mine", "another", "both", "not known which", "dormant", "on its way out", "gone"],
)
def test_a_gpu_is_free_when_no_engine_can_hold_it(holding: GpuHolder, free: bool) -> None:
    assert judge([holding], frozenset({MINE})).free is free


def test_without_names_every_gpu_is_meant() -> None:
    assert not judge([engine(OTHER)], frozenset()).free
    assert judge([], frozenset()) == Vacancy(True)


@pytest.mark.parametrize(
    ("given", "environment", "gpus"),
    [
        ("GPU-a, GPU-b", {}, ("GPU-a", "GPU-b")),
        (None, {"NVIDIA_VISIBLE_DEVICES": "GPU-c"}, ("GPU-c",)),
        (None, {"NVIDIA_VISIBLE_DEVICES": "all"}, ()),
        (None, {}, ()),
    ],
)
def test_gpus_are_those_that_the_container_was_given(
    given: str | None, environment: dict[str, str], gpus: tuple[str, ...]
) -> None:
    assert visible_gpus(given, environment) == gpus


def test_a_gpu_without_uuid_is_refused() -> None:
    assert main(["--gpus", "0", "--deadline-seconds", "0"]) == 2


Holders = list[GpuHolder]


@pytest.fixture
async def host() -> AsyncIterator[tuple[str, Holders]]:
    """The page of an engine host; the list is what it holds."""
    holders: Holders = []
    app = web.Application()
    app.add_routes([page(lambda: holders)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", holders
    await runner.cleanup()


class Clock:
    """Virtual time; ``then`` is what happens while somebody sleeps."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self.slept = 0
        self._then = then

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1
        self._then()


async def _wait(wish: VacateOptions, clock: Clock) -> tuple[bool, list[str]]:
    received: list[str] = []
    free = await asyncio.to_thread(wait, wish, received.append, clock, clock.sleep)
    return free, received


async def test_it_blocks_until_the_engine_is_gone(host: tuple[str, Holders]) -> None:
    url, holders = host
    holders.append(engine(MINE))
    clock = Clock()

    def gone_after_three() -> None:
        if clock.slept == 3:
            holders.clear()

    clock._then = gone_after_three
    free, result = await _wait(VacateOptions(url, (MINE,), 60.0), clock)
    assert free
    assert clock.now == 3.0
    assert result == ["waiting: rollout engines hold the GPUs: lease-a-0 (Serving)"]


async def test_the_deadline_names_who_holds_the_gpu(host: tuple[str, Holders]) -> None:
    url, holders = host
    holders.append(engine(MINE, state=EngineState.STOPPING))
    free, result = await _wait(VacateOptions(url, (MINE,), 5.0), Clock())
    assert not free
    assert result[-1].startswith("not free after 5 s: rollout engines hold the GPUs: lease-a-0")


async def test_a_node_without_engine_host_says_what_to_do() -> None:
    wish = VacateOptions("http://127.0.0.1:1", (), 2.0)
    free, result = await _wait(wish, Clock())
    assert not free
    assert "--absent pass" in result[-1]
    free, result = await _wait(replace(wish, absent_passes=True), Clock())
    assert free


async def test_garbage_is_no_answer() -> None:
    assert msgspec.json.decode(b'{"free": true}', type=Vacancy).free
    free, result = await _wait(VacateOptions("file:///etc/passwd", (), 0.0), Clock())
    assert not free
    assert "no http address" in result[-1]
