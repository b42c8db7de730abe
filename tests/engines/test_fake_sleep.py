"""The fake engine as a serving engine that sleeps, asked by what asks the real ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from rose_dev.shell import ending_with_us
from rose_engines.errors import EngineUnavailable
from rose_engines.process.sleep import SGLangServing, SleepRefused
from rose_engines.weights.memory import PAGE

MIB = 1 << 20
CACHE = 64 * MIB
ASK = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}


def started(*flags: str) -> Iterator[tuple[int, str]]:
    argv = [sys.executable, "-m", "rose_engines.fake", f"--kv-bytes={CACHE}", *flags]
    with subprocess.Popen(ending_with_us(argv), stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            yield engine.pid, engine.stdout.readline().strip().removeprefix("url=")
        finally:
            engine.kill()


@pytest.fixture
def engine() -> Iterator[tuple[int, str]]:
    """Process id and address of one that can sleep."""
    yield from started("--memory-saver")


@pytest.fixture
def sleepless() -> Iterator[tuple[int, str]]:
    yield from started()


def held(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * PAGE


async def test_its_memory_goes_and_comes_back_and_a_request_waits_meanwhile(
    engine: tuple[int, str],
) -> None:
    pid, url = engine
    async with aiohttp.ClientSession() as http:
        serving = SGLangServing(http, url)
        before, answer = held(pid), await serving.probe()
        assert await serving.idle()
        await serving.release()
        assert before - held(pid) > CACHE - 4 * MIB
        waiting = asyncio.create_task(http.post(f"{url}/generate", json=ASK))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done()
        await serving.resume()
        assert held(pid) > before - 4 * MIB
        async with await waiting as reply:
            assert len((await reply.json())["output_ids"]) == 4
        assert await serving.probe() == answer


async def test_a_release_beside_a_request_is_refused_and_serving_goes_on(
    engine: tuple[int, str],
) -> None:
    _, url = engine
    long = {**ASK, "sampling_params": {"max_new_tokens": 100_000}, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=long) as reply:
        await reply.content.readline()
        with pytest.raises(SleepRefused, match="busy"):
            await SGLangServing(http, url).release()
        assert await SGLangServing(http, url).probe()


async def test_without_the_flag_it_cannot_sleep(sleepless: tuple[int, str]) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineUnavailable):
            await SGLangServing(http, sleepless[1]).release()
