"""Bodies on their way to a server in a sandbox: passed on as they come, bounded before they do."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rose_core.sandboxes.tunnels import TunnelLimits
from rose_sandbox.client import Sandbox
from rose_sandbox.host import Host
from rose_sandbox.http import UNNAMED_BYTES, ServingTraffic, application
from rose_sandbox.runtimes.runtime import FILE_BYTES
from tests.sandbox.test_host import World

LARGE = 64 << 20
"""More than the sockets of a way take in by themselves."""


@dataclass
class Inside:
    """A server in the sandbox that reads a body when it is let."""

    reads: asyncio.Event = field(default_factory=asyncio.Event)
    lengths: list[str | None] = field(default_factory=list)

    async def upload(self, request: web.Request) -> web.Response:
        self.lengths.append(request.headers.get("Content-Length"))
        await self.reads.wait()
        digest = hashlib.sha256()
        async for piece in request.content.iter_any():
            digest.update(piece)
        return web.Response(text=digest.hexdigest())

    async def refuse(self, _: web.Request) -> web.Response:
        return web.Response(status=403, text="not here")


@dataclass
class Port:
    host: Host
    url: str
    inside: Inside
    http: aiohttp.ClientSession


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    world, inside = World(tmp_path), Inside()
    theirs = web.Application()
    theirs.add_routes([web.post("/upload", inside.upload), web.post("/refuse", inside.refuse)])
    runners = [
        web.AppRunner(theirs, shutdown_timeout=0.1),
        web.AppRunner(application(world.host, ServingTraffic(), lambda: "word")),
    ]
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    world.put_server(runners[0].addresses[0])
    url = f"http://127.0.0.1:{runners[1].addresses[0][1]}"
    async with (
        Sandbox(session="s", url=url, token="word"),
        aiohttp.ClientSession(headers={"Authorization": "Bearer word"}) as http,
    ):
        yield Port(world.host, f"{url}/sessions/s/port/80", inside, http)
    for runner in reversed(runners):
        await runner.cleanup()


async def begun() -> AsyncIterator[bytes]:
    """A body whose rest never comes."""
    yield b"x" * 1024
    await asyncio.Event().wait()


async def quarters(count: int) -> AsyncIterator[bytes]:
    """So many of what a body without a length may have."""
    for _ in range(count):
        yield b"x" * (UNNAMED_BYTES // 4)
        await asyncio.sleep(0)


async def test_a_large_body_is_sent_on_no_faster_than_it_is_read(port: Port) -> None:
    sent, digest = 0, hashlib.sha256()

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for number in range(LARGE >> 20):
            piece = bytes([number % 256]) * (1 << 20)
            digest.update(piece)
            yield piece
            sent += len(piece)

    headers = {"Content-Length": str(LARGE)}
    asked = port.http.post(f"{port.url}/upload", data=pieces(), headers=headers)
    answer = asyncio.ensure_future(asked.__aenter__())
    before = -1
    while not port.inside.lengths or sent > before:  # until its caller is held up
        before = sent
        await asyncio.sleep(0.2)
    assert 0 < sent < LARGE // 2, "what is not read inside waits at its caller"
    port.inside.reads.set()
    async with await answer as result:
        assert (result.status, await result.text()) == (200, digest.hexdigest())
    assert port.inside.lengths == [str(LARGE)]


async def test_one_that_is_too_large_by_its_own_word_is_refused_before_it_is_sent(
    port: Port,
) -> None:
    headers = {"Content-Length": str(FILE_BYTES + 1)}
    async with port.http.post(f"{port.url}/upload", data=begun(), headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]) == (413, "TooLarge")
    assert not port.inside.lengths


async def test_one_without_a_length_is_held_up_to_a_bound(port: Port) -> None:
    async with port.http.post(f"{port.url}/upload", data=quarters(64)) as answer:
        assert (answer.status, (await answer.json())["error"]) == (413, "TooLarge")
    assert not port.inside.lengths
    port.inside.reads.set()
    async with port.http.post(f"{port.url}/upload", data=quarters(4)) as answer:
        assert await answer.text() == hashlib.sha256(b"x" * UNNAMED_BYTES).hexdigest()
    assert port.inside.lengths == [str(UNNAMED_BYTES)]


async def test_an_answer_may_come_before_all_is_sent(port: Port) -> None:
    headers = {"Content-Length": str(LARGE)}
    async with port.http.post(f"{port.url}/refuse", data=begun(), headers=headers) as answer:
        assert (answer.status, await answer.text()) == (403, "not here")


async def test_one_that_is_packed_is_told_its_length_as_it_is_passed_on(port: Port) -> None:
    """The host unpacks what its caller packed, so the caller's length is of something else."""
    port.inside.reads.set()
    plain = b"rose " * 1000
    headers = {"Content-Encoding": "gzip"}
    packed = gzip.compress(plain)
    async with port.http.post(f"{port.url}/upload", data=packed, headers=headers) as answer:
        assert await answer.text() == hashlib.sha256(plain).hexdigest()
    assert port.inside.lengths == [str(len(plain))]
    bomb = gzip.compress(bytes(2 * UNNAMED_BYTES))
    async with port.http.post(f"{port.url}/upload", data=bomb, headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]) == (413, "TooLarge")


async def test_whoever_sends_no_more_of_a_body_gives_the_place_back(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port.host, "tunnel_limits", TunnelLimits(idle_seconds=0.3))
    port.inside.reads.set()
    headers = {"Content-Length": str(LARGE)}
    async with port.http.post(f"{port.url}/upload", data=begun(), headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]) == (400, "ValueError")


async def test_a_file_is_bounded_before_it_is_read_too(port: Port) -> None:
    url, path = port.url.replace("/port/80", "/files"), {"path": "/a"}
    headers = {"Content-Length": str(FILE_BYTES + 1)}
    async with port.http.put(url, params=path, data=begun(), headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]) == (413, "TooLarge")
    async with port.http.put(url, params=path, data=quarters(64)) as answer:
        assert (answer.status, (await answer.json())["error"]) == (413, "TooLarge")
    async with port.http.put(url, params=path, data=quarters(4)) as answer:
        assert answer.status == 204
    assert await port.host.read_file("s", "/a") == b"x" * UNNAMED_BYTES
    async with port.http.put(url, params=path, data=b"") as answer:
        assert answer.status == 204
    assert await port.host.read_file("s", "/a") == b""
