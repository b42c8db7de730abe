"""Turns part between two real SGLang engines of truly different speed, as RollArt has it.

One reads slowly: the kernel gives its processes a part of a core. The other writes slowly: it waits
before each forward pass. All that the router knows of them is what it has measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from rose_agent.os.limits import Limiter, Limits
from rose_core.rollouts.engines.estimates import Speed
from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.models import make_named
from rose_dev.owners import owner
from rose_router.config import Settings
from rose_router.main import running
from tests.router.test_real_engines import VERSION, update_of

pytestmark = [
    pytest.mark.engine, pytest.mark.long, pytest.mark.slow, pytest.mark.asyncio,
    pytest.mark.timeout(900),  # one engine has a twenty-fifth of a core
]  # fmt: skip

# Of one core, and seconds before a pass: so that reading 3,900 tokens is at least twice as fast on
# the one, and writing twice as fast on the other, whatever the machine.
PERCENT, SLEEP_SECONDS = 4, 0.3
READS, WRITES = (3900, 1), (4, 20)
# Averages take some turns to reach what is so, more where other work disturbs them; what is
# measured must differ by so much before turns are asked to part.
LESSONS, APART = 8, 1.5
TURNS = 8


@pytest.fixture
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    make_named("tiny-peaked")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def start(folder: Path) -> RealEngine:
            return stack.enter_context(start_engine(folder, version=VERSION))

        # Made here: pytest's factory is not safe with threads.
        folders = [tmp_path_factory.mktemp(name) for name in ("reader", "writer")]
        yield list(pool.map(start, folders))


@contextmanager
def throttled(engine: RealEngine) -> Iterator[None]:
    """The engine's processes have a part of a core, by the kernel's quota."""
    limiter = Limiter.detect(Limits(cpu_percent=PERCENT), "rose-test-")
    (folder,) = limiter.prepare("slow")
    try:
        for pid in _group_of(engine.process.pid):
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        home = folder.parent / "cgroup.procs"
        for text in (folder / "cgroup.procs").read_text().split():
            home.write_text(text)
        limiter.remove("slow")


def _group_of(leader: int) -> list[int]:
    """Everything of the engine's process group."""
    return [one.pid for one in psutil.process_iter() if os.getpgid(one.pid) == leader]


class Caller:
    """Sends turns that differ, so that no prefix cache answers."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url, self._seed = http, url, 0

    async def turn(self, size: tuple[int, int]) -> str:
        """Read and write so many tokens; the name of the engine that did."""
        read, written = size
        self._seed += 1
        body = {
            "input_ids": [2 + (self._seed * 31 + n * 7) % 250 for n in range(read)],
            "sampling_params": {"max_new_tokens": written, "temperature": 0, "ignore_eos": True},
            "rose": {"expected_tokens": written},
        }
        async with self._http.post(f"{self._url}/generate", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        name: str = answer["meta_info"]["rose"]["engines"][0]["engine"]
        return name


def _are_apart(reader: Speed, writer: Speed) -> bool:
    """Each is measured to be slower at what the other one is good at."""
    reads = writer.prefill_seconds_per_token / reader.prefill_seconds_per_token
    return min(reads, reader.step_seconds / writer.step_seconds) > APART


async def test_turns_that_read_much_and_turns_that_write_much_part(
    engines: list[RealEngine],
) -> None:
    found = [
        msgspec.structs.replace(update_of(one, name), device_class=name, cap=1)
        for one, name in zip(engines, ("reader", "writer"), strict=True)
    ]
    settings = Settings(lease="team/grpo", attach_token="secret")
    slow_to_write, slow_to_read = engines
    async with aiohttp.ClientSession() as http, running(settings) as router:
        caller = Caller(http, f"http://127.0.0.1:{router.http_port}")
        waits = {"forward_sleep_time": SLEEP_SECONDS}
        await http.post(f"{slow_to_write.url}/slow_down", json=waits)
        with throttled(slow_to_read):
            for _ in range(LESSONS):
                for update in found:
                    async with owner(router.attach_port, update, "secret"):
                        for size in (READS, WRITES):
                            await caller.turn(size)
                speeds = router.service.fleet.by_class
                if _are_apart(speeds["reader"], speeds["writer"]):
                    break
            async with (
                owner(router.attach_port, found[0], "secret"),
                owner(router.attach_port, found[1], "secret"),
            ):
                read = [await caller.turn(READS) for _ in range(TURNS)]
                written = [await caller.turn(WRITES) for _ in range(TURNS)]
    reader, writer = speeds["reader"], speeds["writer"]
    measured = f"reader {reader}, writer {writer}"
    assert _are_apart(reader, writer), measured
    # A few turns are placed at random, to learn.
    assert read.count("reader") >= TURNS - 2, (read, measured)
    assert written.count("writer") >= TURNS - 2, (written, measured)
