"""A real ``rose router`` under floods: bounded memory, refusals in time, and alive after each."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from bench import flood
from rose_dev.process_testing import CLI, spawn_process
from rose_wire.ports import free_port

MIB = 1 << 20
LIMIT = 768 * MIB
IDS = 1_000_000


@dataclass
class Router:
    """A router's process."""

    url: str
    port: int
    pid: int

    def peak(self) -> int:
        """The most memory that it ever held, in bytes."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


@asynccontextmanager
async def router(*flags: str) -> AsyncIterator[Router]:
    port, attach = free_port(), free_port()
    process = await spawn_process(
        *(CLI, "router", "--lease", "team/grpo"),
        *("--http-address", f"127.0.0.1:{port}", "--attach-address", f"127.0.0.1:{attach}"),
        *("--memory-bytes", str(LIMIT), "--drain-seconds", "0", *flags),
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "ROSE_TURN_TOKEN": ""},
    )
    made = Router(f"http://127.0.0.1:{port}", port, process.pid)
    try:
        async with aiohttp.ClientSession() as http:
            while not await alive(http, made):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.1)
        yield made
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def alive(http: aiohttp.ClientSession, one: Router) -> bool:
    try:
        async with http.get(one.url + "/healthz") as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


def body(ids: int, answers: int) -> bytes:
    words = ",".join(str(100_000 + number % 1000) for number in range(ids))
    sampling = f'{{"max_new_tokens":1,"n":{answers}}}'
    return f'{{"input_ids":[{words}],"sampling_params":{sampling}}}'.encode()


async def statuses(http: aiohttp.ClientSession, url: str, data: bytes, count: int) -> Counter[int]:
    async def one() -> int:
        async with http.post(url + "/generate", data=io.BytesIO(data)) as reply:
            await reply.read()
            return reply.status

    return Counter(await asyncio.gather(*(one() for _ in range(count))))


async def test_a_million_ids_for_every_one_of_four_thousand_answers() -> None:
    async with router() as one, aiohttp.ClientSession() as http:
        result = await statuses(http, one.url, body(IDS, 4096), 4)
        assert result.keys() <= {413, 503}, result
        assert await alive(http, one)
        assert one.peak() < LIMIT


async def test_prompts_beyond_the_leases_context_are_refused_at_once() -> None:
    async with router("--context-tokens", "4096") as one, aiohttp.ClientSession() as http:
        assert await statuses(http, one.url, body(5000, 1), 1) == {400: 1}
        assert one.peak() < LIMIT


async def test_many_bodies_of_sixteen_mebibytes_at_once() -> None:
    large = b'{"input_ids":[1],"x":[' + b"{}," * (5 * MIB) + b"{}]}"
    async with router() as one, aiohttp.ClientSession() as http:
        result = await statuses(http, one.url, large[: 16 * MIB - 1], 12)
        assert result.keys() <= {400, 413, 422, 503}, result
        assert await alive(http, one)
        assert one.peak() < LIMIT


async def test_a_queue_that_would_be_full_is_so_before_the_turns_are_made() -> None:
    flags = ("--queue-limit", "8", "--queue-seconds", "1")
    async with router(*flags) as one, aiohttp.ClientSession() as http:
        assert await statuses(http, one.url, body(10, 9), 1) == {429: 1}


async def test_callers_that_send_their_heads_and_bodies_for_ever() -> None:
    flags = ("--head-seconds", "1", "--body-seconds", "1", "--max-connections", "400")
    async with router(*flags) as one, aiohttp.ClientSession() as http:
        open_ = []
        for number in range(390):
            # Each sends at once: on a busy machine the first would have had its second before the
            # last is there, and what is sent to a connection that has ended resets it.
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            slow = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
            writer.write(slow + (b"Content-Length: 100\r\n\r\n{" if number % 2 else b"X-A"))
            open_.append((reader, writer))
        assert await alive(http, one)
        for reader, writer in open_:
            await asyncio.wait_for(reader.read(), 60)  # it ends the connection, not the caller
            writer.close()
        assert one.peak() < LIMIT


@pytest.mark.slow
async def test_ten_thousand_connections() -> None:
    async with router("--max-connections", "2000") as one, aiohttp.ClientSession() as http:
        opened, refused = [], 0
        for _ in range(10_000):
            try:
                opened.append(await asyncio.open_connection("127.0.0.1", one.port))
            except OSError:
                refused += 1
                if refused > 10:
                    break
        for _, writer in opened:
            writer.close()
        while not await alive(http, one):  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.1)
        assert one.peak() < LIMIT


@pytest.mark.slow
async def test_a_hundred_tenants_are_served_through_every_flood() -> None:
    """Each asks once in the window. How long that took is the benchmark's to report, and so is
    what the same flood costs them where it goes to another router.
    """
    # A flood runs for a second before its window, too.
    brief = ("--rounds=1", "--seconds=1", "--tenants=100", "--per-second=100", "--no-beside")
    given = flood.flags().parse_args(brief)
    figures = {one.name: one for one in await flood.measure(given)}
    for name in flood.FLOODS:
        assert figures[f"{name}: refused turns of others"].value == 0
        assert figures[f"{name}: tenants without an answer"].value == 0
        assert figures[f"{name}: peak of the router"].met
        assert figures[f"{name}: p99 of others, flooded to quiet"].value is not None
