"""A router at its end: whoever asks gets an answer, and is sent to another."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rose_router.config import Settings
from rose_router.main import running
from rose_router.turns.service import leaves_at
from tests.router.conftest import LEASE, Stage

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


class Ending:
    """A router with an engine, which is told to end while it is looked at."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._told = asyncio.Event()

    async def announced(self) -> None:
        """Wait until it is told to end."""
        await self._told.wait()

    async def announce(self) -> None:
        """Tell it, as SIGTERM does; returns when it has begun to end."""
        self._told.set()
        async with asyncio.timeout(30):
            while not self.stage.router.service.leaving:  # noqa: ASYNC110  # in its own task
                await asyncio.sleep(0)


@asynccontextmanager
async def ending(lame_duck_seconds: float, token_seconds: float = 0.002) -> AsyncIterator[Ending]:
    """A router; at the end of the block it has ended."""
    begun: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
    settings = Settings(LEASE, lame_duck_seconds=lame_duck_seconds, drain_seconds=5)

    async def live() -> None:
        async with (
            aiohttp.ClientSession() as http,
            AsyncExitStack() as stack,
            running(settings) as router,
        ):
            made = Ending(Stage(router, http, stack))
            await made.stage.engine(token_seconds=token_seconds)
            begun.set_result(made)
            await made.announced()

    life = asyncio.create_task(live())
    either: set[asyncio.Future[Any]] = {life, begun}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        life.result()
    try:
        yield await begun
    finally:
        (await begun)._told.set()
        async with asyncio.timeout(30):
            await life


async def turn(http: aiohttp.ClientSession, url: str) -> aiohttp.ClientResponse:
    """A turn that was answered, whole."""
    async with http.post(f"{url}/generate", json=BODY) as reply:
        assert len((await reply.json())["output_ids"]) == 4
        return reply


async def test_while_load_balancers_send_callers_they_are_served_and_sent_elsewhere() -> None:
    async with (
        ending(0.5) as end,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as kept,
        aiohttp.ClientSession() as late,
    ):
        url = end.stage.url
        assert "Connection" not in (await turn(kept, url)).headers
        await end.announce()
        # Over the connection that was there, and over one of a caller who comes now.
        for http in (kept, late):
            assert (await turn(http, url)).headers["Connection"] == "close"
        async with late.get(f"{url}/healthz") as reply:
            assert (reply.status, await reply.text()) == (503, "leaving\n")
        async with late.get(f"{url}/health") as reply:
            assert reply.status == 200


async def test_who_had_a_stream_as_it_was_told_to_end_is_sent_elsewhere_after_it() -> None:
    body = json.dumps({**BODY, "stream": True}).encode()
    async with ending(3, token_seconds=0.1) as end, aiohttp.ClientSession() as late:
        reader, writer = await asyncio.open_connection("127.0.0.1", end.stage.router.http_port)
        head = b"POST /generate HTTP/1.1\r\nHost: router\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        received = await reader.readuntil(b"data: ")
        await end.announce()
        received += await asyncio.wait_for(reader.read(), 20)
        assert received.endswith(b"0\r\n\r\n")
        async with late.get(f"{end.stage.url}/health") as reply:
            assert reply.status == 200, "the connection ended with its stream, before the router"
        writer.close()


async def test_a_turn_counts_as_it_is_asked_for_however_long_it_takes() -> None:
    async with ending(3, token_seconds=3600) as end, aiohttp.ClientSession() as late:
        service = end.stage.router.service
        await end.announce()
        asking = asyncio.create_task(turn(late, end.stage.url))
        async with asyncio.timeout(30):
            while not len(service.ledger):  # noqa: ASYNC110  # in its own task
                await asyncio.sleep(0.01)
        assert service.asked_at > 0
        asking.cancel()
        await asyncio.wait({asking})


async def test_who_has_dialled_as_it_closes_is_told_and_not_cut_off() -> None:
    body = json.dumps(BODY).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with ending(0) as end:
        port = end.stage.router.http_port
        silent = await asyncio.open_connection("127.0.0.1", port)
        await turn(end.stage.http, end.stage.url)  # whoever came before has been taken
        # The kernel has taken these, and the router at most a few of them.
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        await end.announce()
        callers = [silent, *[await asyncio.open_connection(sock=one) for one in waiting]]
        for _, writer in callers:
            writer.write(request)
        for reader, writer in callers:
            output = await asyncio.wait_for(reader.read(), 20)
            assert output.startswith(b"HTTP/1.1 503"), output
            assert b'"Draining"' in output
            assert b"Retry-After: 5" in output
            writer.close()


@pytest.mark.parametrize(
    ("asked", "quiet", "wanted"),
    [
        (0.0, 0.0, 100.0),  # nobody is sent here
        (0.0, 2.0, 102.0),
        (105.0, 2.0, 107.0),  # they go on coming
        (109.5, 2.0, 110.0),  # for too long
        (0.0, 60.0, 110.0),
    ],
)
def test_it_leaves_when_nobody_has_come_for_some_time(
    asked: float, quiet: float, wanted: float
) -> None:
    assert leaves_at(100.0, asked, quiet) == wanted
