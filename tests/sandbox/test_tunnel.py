"""Connections into sandboxes have a number, an idle time, bytes under way and an owner's life."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from rose_core.sandboxes.tunnels import TunnelLimits
from rose_dev.waiting import until
from rose_sandbox.client import RemoteHost, Sandbox
from rose_sandbox.errors import HostAway, NotListening, TooManyTunnels, UnknownSandbox
from rose_sandbox.http import MOST_HEADERS, ServingTraffic, application
from rose_sandbox.metrics import REGISTRY
from tests.sandbox.test_host import World

END = "\r\nConnection: close\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serving = Callable[[TunnelLimits], AbstractAsyncContextManager[RemoteHost]]


class Inside:
    """A server in a sandbox that does with each connection what the test says."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[Streams] = asyncio.Queue()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.came.put((reader, writer))


@pytest.fixture
def inside() -> Inside:
    return Inside()


@pytest.fixture
def serving(tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """A host with such limits, whose sandboxes all have that server at port 80."""

    @asynccontextmanager
    async def serve(limits: TunnelLimits) -> AsyncIterator[RemoteHost]:
        world = World(tmp_path)
        monkeypatch.setattr(world.host, "tunnel_limits", limits)
        server = await asyncio.start_server(inside, "127.0.0.1", 0)
        world.put_server(server.sockets[0].getsockname())
        runner = web.AppRunner(application(world.host, ServingTraffic(), lambda: "word"))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        far = RemoteHost(f"http://127.0.0.1:{runner.addresses[0][1]}", "word")
        try:
            yield far
        finally:
            await far.close()
            while not inside.came.empty():
                inside.came.get_nowait()[1].close()
            server.close()
            await runner.cleanup()

    return serve


async def opened(box: Sandbox) -> Streams:
    return await asyncio.open_connection(sock=await box.connect(80))


def ends(by: str) -> float:
    return REGISTRY.get_sample_value("rose_sandbox_tunnel_ends_total", {"by": by}) or 0.0


def there_are() -> float:
    return REGISTRY.get_sample_value("rose_sandbox_tunnels") or 0.0


async def test_a_sandbox_has_as_many_as_its_host_allows_and_others_have_their_own(
    serving: Serving,
) -> None:
    before, refused = there_are(), ends("refused")
    async with (
        serving(TunnelLimits(most=2)) as far,
        Sandbox(session="one", host=far) as one,
        Sandbox(session="two", host=far) as two,
    ):
        _, first = await opened(one)
        _, second = await opened(one)
        with pytest.raises(TooManyTunnels, match="session one has 2 tunnels"):
            await one.connect(80)
        assert ends("refused") == refused + 1
        _, third = await opened(two)
        assert there_are() == before + 3
        first.close()
        await until(lambda: there_are() == before + 2)
        _, fourth = await opened(one)
        for writer in (second, third, fourth):
            writer.close()
    await until(lambda: there_are() == before)


async def test_one_through_which_nothing_passes_ends_and_says_so(
    serving: Serving, inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    was = ends("idle")
    async with (
        serving(TunnelLimits(idle_seconds=0.3)) as far,
        Sandbox(session="s", host=far) as box,
    ):
        reader, writer = await opened(box)
        _, theirs = await inside.came.get()
        with caplog.at_level(logging.WARNING):
            assert await reader.read() == b""
            await until(lambda: "port 80 of s has ended: nothing passed for 0.3 s" in caplog.text)
        writer.close()
        theirs.close()
    assert ends("idle") == was + 1


async def test_a_host_that_says_nothing_is_away(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await asyncio.start_server(inside, "127.0.0.1", 0)
    far = RemoteHost(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "word")
    monkeypatch.setattr("rose_sandbox.client._ANSWER_SECONDS", 0.3)
    with pytest.raises(HostAway, match="does not answer"):
        await far.connect("s", 80)
    await far.close()
    (await inside.came.get())[1].close()
    server.close()


async def test_bytes_either_way_keep_it(serving: Serving, inside: Inside) -> None:
    was = ends("idle")
    async with (
        serving(TunnelLimits(idle_seconds=5.0)) as far,
        Sandbox(session="s", host=far) as box,
    ):
        reader, writer = await opened(box)
        its_reader, its_writer = await inside.came.get()
        for n in range(20):
            writer.write(b"%02d" % n)
            assert await its_reader.readexactly(2) == b"%02d" % n
            its_writer.write(b"*")
            assert await reader.readexactly(1) == b"*"
        writer.close()
        assert await its_reader.read() == b""
        its_writer.close()
    assert ends("idle") == was


async def test_it_ends_with_its_sandbox(
    serving: Serving, inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    was = ends("sandbox")
    async with serving(TunnelLimits()) as far:
        with caplog.at_level(logging.WARNING):
            async with Sandbox(session="s", host=far) as box:
                reader, writer = await opened(box)
                _, theirs = await inside.came.get()
            assert await reader.read() == b""
            await until(lambda: "its sandbox has ended here" in caplog.text)
        writer.close()
        theirs.close()
        with pytest.raises(UnknownSandbox, match="session s has no sandbox here"):
            await far.connect("s", 80)
        with pytest.raises(NotListening, match="port 81"):
            async with Sandbox(session="t", host=far) as other:
                await other.connect(81)
    assert ends("sandbox") == was + 1


async def test_a_server_that_does_not_read_is_not_read_for(
    serving: Serving, inside: Inside
) -> None:
    """Bytes wait with who sends them, not in the host's memory."""
    small = 1 << 16
    async with serving(TunnelLimits()) as far, Sandbox(session="s", host=far) as box:
        _, writer = await opened(box)
        _, theirs = await inside.came.get()
        theirs.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, small)
        passed = 0

        async def pour() -> None:
            nonlocal passed
            while True:
                writer.write(b"x" * small)
                await writer.drain()
                passed += small

        pouring = asyncio.create_task(pour())
        seen = -1
        while seen != passed:  # it stands when it stands twice
            seen = passed
            await asyncio.sleep(0.5)
        assert 0 < passed < 64 << 20
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)
        writer.transport.abort()
        theirs.transport.abort()


async def test_a_message_that_is_too_large_ends_it(serving: Serving, inside: Inside) -> None:
    async with serving(TunnelLimits()) as far, Sandbox(session="s", host=far):
        line = await far._http.ws_connect(f"{far._url}/sessions/s/tunnel/80")
        _, theirs = await inside.came.get()
        await line.send_bytes(b"x" * (2 << 20))
        assert (await line.receive()).type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED}
        assert line.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
        theirs.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "said nothing for 0.3 s"),
        (b"HTTP/1.0 200 OK\r\n" + b"x: y\r\n" * (MOST_HEADERS + 1), "more than 100 headers"),
        (b"hello\r\n", "does not speak HTTP"),
        (b"HTTP/1.0 100 Continue\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.0 " + b"9" * 5000 + b" ?\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.0 200 OK\r\nx: " + b"y" * (1 << 17) + b"\r\n\r\n", "too long a header"),
    ],
)
async def test_a_port_whose_server_says_no_answer_of_http_is_told_by_name(
    serving: Serving, inside: Inside, text: bytes, why: str
) -> None:
    async with (
        serving(TunnelLimits(idle_seconds=0.3)) as far,
        Sandbox(session="s", host=far),
    ):
        asking = asyncio.create_task(far._call("GET", "/s/port/80/", None))
        _, theirs = await inside.came.get()
        theirs.write(text)
        with pytest.raises(NotListening, match=why):
            await asking
        theirs.close()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "text", ["200 OK\r\nContent-Type: a\rX-Header: b", "204 No Content", "304 Not Modified"]
)
async def test_what_a_port_says_is_one_answer_and_never_the_next_one(
    serving: Serving, inside: Inside, text: str, method: str
) -> None:
    """A caller's connection goes on to other sessions: a sandbox must not answer for them."""
    async with serving(TunnelLimits()) as far, Sandbox(session="s", host=far):
        url = URL(far._url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"{method} {{}} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer word\r\n\r\n"
        writer.write(head.format("/sessions/s/port/80/").encode())
        _, theirs = await inside.came.get()
        forged = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
        theirs.write(f"HTTP/1.0 {text}\r\n\r\n{forged}".encode())
        theirs.close()
        writer.write(head.format("/sessions").replace("\r\n\r\n", END).encode())
        answers = (await reader.read()).decode()
        if "chunked" in answers:  # the one with a body has it there
            answers = answers.replace(f"{len(forged):x}\r\n{forged}\r\n", "")
        assert answers.startswith(f"HTTP/1.1 {text[:3]}")
        assert "forged" not in answers
        assert answers.count("HTTP/1.1 ") == 2, "of the port, and of the sessions"
        writer.close()


async def test_a_port_that_says_nothing_is_waited_for_no_longer_than_its_caller_waits(
    serving: Serving, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks again and again after its own time-out would otherwise use all tunnels up."""
    monkeypatch.setattr("rose_sandbox.http.GONE_SECONDS", 0.05)
    before = there_are()
    async with serving(TunnelLimits(most=1)) as far, Sandbox(session="s", host=far) as box:
        asking = asyncio.create_task(far._call("GET", "/s/port/80/", None))
        its_reader, theirs = await inside.came.get()
        assert await its_reader.readuntil(b"\r\n\r\n")
        with pytest.raises(TooManyTunnels):
            await box.connect(80)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await its_reader.read() == b"", "hung up inside too"
        await until(lambda: there_are() == before)
        _, writer = await opened(box)
        writer.close()
        theirs.close()
