"""The front door: tokens, certificates, and callers who take more than their share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rose_core.rollouts.transcripts.transcript import StreamEvent
from rose_dev.cluster.pki import Authority
from rose_dev.waiting import until
from rose_router import metrics
from rose_router.engines.connections import Connections
from rose_router.engines.engine_client import HttpEngineClient, Target
from rose_router.http.admission.bearer import Tokens
from rose_router.listener import ConnectionLimits
from tests.router.conftest import Stage
from tests.router.test_http import ask
from tests.wire.test_tls import issue

Make = Callable[..., AbstractAsyncContextManager[Stage]]


# --- tokens


def test_a_token_is_replaced_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("old\n")
    tokens = Tokens(file)
    assert tokens.good("Bearer old")
    file.write_text("old\nnew\n")
    tokens._looked = -10.0
    assert tokens.good("Bearer new")
    assert tokens.good("bearer old")
    file.unlink()
    tokens._looked = -10.0
    assert tokens.good("Bearer new")


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic old", "old"])
def test_anything_else_is_not_good(header: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("old\n")
    assert not Tokens(file).good(header)


def test_a_file_without_token_is_an_error_not_an_open_door(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("\n")
    with pytest.raises(ValueError, match="no token"):
        Tokens(tmp_path / "tokens")


def test_the_environment_may_hold_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Tokens().asked
    monkeypatch.setenv("ROSE_TURN_TOKEN", "t")
    assert Tokens().good("Bearer t")


async def test_probes_bring_no_token_and_turns_must(stage: Make, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("t")
    async with stage(turn_token_file=tmp_path / "tokens") as s:
        await s.engine()
        async with s.http.get(s.url + "/health") as reply:
            assert reply.status == 200
        async with s.post("/generate", ask()) as reply:
            assert reply.status == 401
        async with s.post("/generate", ask(), headers={"Authorization": "Bearer t"}) as reply:
            assert reply.status == 200


# --- certificates


async def test_the_url_speaks_tls_with_a_certificate_that_may_be_renewed(
    stage: Make, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "pki")
    folder = issue(authority, tmp_path / "tls")
    async with stage(http_tls_dir=folder) as s:
        await s.engine()
        url = s.url.replace("http:", "https:")
        trust = ssl.create_default_context(cafile=str(authority.certificate))
        async with s.http.post(url + "/generate", json=ask(), ssl=trust) as reply:
            assert reply.status == 200
        with pytest.raises(aiohttp.ClientError):
            await s.http.get(s.url + "/health")


# --- limits


async def test_a_connection_that_says_nothing_is_closed(stage: Make) -> None:
    async with stage(limits=ConnectionLimits(head_seconds=0.1)) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read(100) == b""
        writer.close()


async def test_a_head_that_does_not_come_is_408(stage: Make) -> None:
    async with stage(limits=ConnectionLimits(head_seconds=0.1)) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        async with asyncio.timeout(30):
            output = await reader.read()
        assert output.startswith(b"HTTP/1.1 408 ")
        assert b"head did not come in time" in output
        writer.close()


async def test_a_connection_that_has_spoken_is_kept(stage: Make) -> None:
    async with stage(limits=ConnectionLimits(head_seconds=0.05)) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        silent, other = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        for _ in range(2):
            writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(30):
                assert b" 200 " in await reader.readline()
                while await reader.readline() != b"\r\n":
                    pass
                with contextlib.suppress(ConnectionResetError):
                    await silent.read()  # the one that said nothing is closed meanwhile
        writer.close()
        other.close()


async def test_a_router_that_is_behind_does_not_count_it_as_silence(stage: Make) -> None:
    async with stage(limits=ConnectionLimits(head_seconds=0.2)) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        await asyncio.sleep(0.02)  # the router has taken the connection
        writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.5)  # noqa: ASYNC251  # nothing can be read meanwhile
        async with asyncio.timeout(30):
            assert b" 200 " in await reader.readline()
        writer.close()


async def test_a_body_that_does_not_come_is_408(stage: Make) -> None:
    async with stage(limits=ConnectionLimits(body_seconds=0.05)) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        async with asyncio.timeout(30):
            assert b" 408 " in await reader.readline()
        writer.close()


async def _asked(port: int) -> asyncio.StreamWriter:
    """A connection over which a request was answered; it stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await reader.readline()
    return writer


async def test_a_connection_too_many_is_503(stage: Make) -> None:
    async with stage(limits=ConnectionLimits(connections=1)) as s:
        held = await _asked(s.router.http_port)
        async with aiohttp.ClientSession() as http:

            async def status() -> int:
                async with http.get(s.url + "/health", headers={"Connection": "close"}) as reply:
                    return reply.status

            found = await status()
            assert found == 503
            held.close()
            while found == 503:
                found = await status()


async def test_a_router_that_ends_hangs_up_on_who_said_nothing(stage: Make) -> None:
    async with stage() as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        async with s.http.get(s.url + "/health") as reply:  # taken after the other one was
            assert reply.status == 200
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_who_says_nothing_shuts_nobody_out(stage: Make) -> None:
    async with stage(limits=ConnectionLimits(connections=8)) as s:
        held = [await _asked(s.router.http_port) for _ in range(4)]
        silent = [await asyncio.open_connection("127.0.0.1", s.router.http_port) for _ in range(30)]
        held.append(await _asked(s.router.http_port))
        async with asyncio.timeout(30):
            for reader, _ in silent[:26]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""  # the oldest gave way
        for writer in held:
            writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            await writer.drain()
            writer.close()
        assert not silent[-1][0].at_eof()
        for _, writer in silent:
            writer.close()


async def test_who_asks_nothing_more_shuts_nobody_out(stage: Make) -> None:
    """One request each would hold all places for an hour; who is being answered stays."""
    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    limits = ConnectionLimits(connections=3, head_seconds=0.4)
    async with stage(limits=limits) as s, aiohttp.ClientSession() as http, asyncio.timeout(60):
        open_ = [await asyncio.open_connection("127.0.0.1", s.router.http_port) for _ in range(3)]
        (asking, body), (first, _), (second, again) = open_
        body.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
        for reader, writer in open_[1:]:
            writer.write(ping)
            assert b" 200 " in await reader.readline()
        found = 503
        while found == 503:
            async with http.get(s.url + "/ping", headers={"Connection": "close"}) as reply:
                found = reply.status
        assert found == 200
        with contextlib.suppress(ConnectionError):
            await first.read()  # it was idle for longest
        again.write(ping)
        await second.readuntil(b" 200 ")
        body.write(b"}")
        assert b" 400 " in await asking.readline()
        for _, writer in open_:
            writer.close()


async def test_more_silent_callers_than_are_looked_at_in_a_step(stage: Make) -> None:
    """All are closed when they are late; those that hang up before make room."""
    async with stage(limits=ConnectionLimits(head_seconds=0.5, connections=300)) as s:
        port = s.router.http_port
        for _ in range(2):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            for _, writer in silent:
                writer.transport.abort()
        late = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        async with asyncio.timeout(30):
            for reader, writer in late:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
                writer.close()
        (await _asked(port)).close()


async def test_a_connection_too_many_is_told_so_through_tls_too(
    stage: Make, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "pki")
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    limits = ConnectionLimits(connections=1)
    async with stage(http_tls_dir=issue(authority, tmp_path / "tls"), limits=limits) as s:
        url = s.url.replace("http:", "https:") + "/health"
        async with aiohttp.ClientSession() as one, one.get(url, ssl=trust) as reply:
            assert reply.status == 200
            async with aiohttp.ClientSession() as other, other.get(url, ssl=trust) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")


async def test_a_caller_that_gives_way_in_its_handshake_is_gone(
    stage: Make, tmp_path: Path
) -> None:
    folder = issue(Authority(tmp_path / "pki"), tmp_path / "tls")
    async with stage(http_tls_dir=folder, limits=ConnectionLimits(connections=1)) as s:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
            writer.write(b"\x16\x03")  # a handshake begins so
            _, other = await asyncio.open_connection("127.0.0.1", s.router.http_port)
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()
            other.close()


async def test_who_speaks_no_tls_takes_no_place_any_more(stage: Make, tmp_path: Path) -> None:
    folder = issue(Authority(tmp_path / "pki"), tmp_path / "tls")
    limits = ConnectionLimits(connections=8, head_seconds=3600)
    async with stage(http_tls_dir=folder, limits=limits) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        await until(lambda: not metrics.REGISTRY.get_sample_value("rose_router_connections"))


async def test_without_descriptors_callers_wait_and_nothing_spins(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, accept = 0, socket.socket.accept

    def without(listener: socket.socket) -> tuple[socket.socket, object]:
        nonlocal tried
        tried += 1
        if tried <= 3:
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    async with stage() as s:
        monkeypatch.setattr(socket.socket, "accept", without)
        (await _asked(s.router.http_port)).close()
        assert tried <= 6


async def test_a_head_above_the_limit_is_refused(stage: Make) -> None:
    async with (
        stage() as s,
        s.http.get(s.url + "/health", headers={"X-Big": "x" * 40_000}) as reply,
    ):
        assert reply.status == 400


async def test_a_caller_that_does_not_read_loses_its_turn(stage: Make) -> None:
    async with stage(limits=ConnectionLimits(write_seconds=0.1)) as s:
        engine = await s.engine(token_seconds=0.0005)
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port, limit=1)
        body = b'{"input_ids":[1],"stream":true,"return_logprob":true,'
        body += b'"sampling_params":{"max_new_tokens":100000}}'
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await reader.read(1)
        await until(lambda: not len(s.router.service.ledger))
        await until(lambda: all(one.finish for one in engine.scheduler.running))
        writer.close()


# --- kept connections that have died


class HalfDead:
    """An engine that answers once per connection and closes it when asked again."""

    def __init__(self) -> None:
        self.asked = 0
        self.connections: set[object] = set()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        transport = request.transport
        assert transport is not None
        if transport in self.connections:
            transport.abort()
            raise ConnectionResetError
        self.connections.add(transport)
        event = b'data: {"output_ids":[1],"meta_info":{"completion_tokens":1,'
        event += b'"finish_reason":{"type":"stop"}}}\n\n'
        return web.Response(body=event, content_type="text/event-stream")


async def last_of(client: HttpEngineClient, target: Target) -> object:
    seen: list[StreamEvent] = []

    def take(events: Iterable[StreamEvent]) -> bool:
        seen.extend(events)
        return True

    await client.stream(target, {}, take)
    return seen[-1].finish


async def test_a_request_that_found_its_kept_connection_dead_is_sent_once_more() -> None:
    engine = HalfDead()
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    target = Target(f"http://127.0.0.1:{runner.addresses[0][1]}")
    connections = Connections()
    try:
        client = HttpEngineClient(connections)
        for _ in range(2):
            assert await last_of(client, target) == {"type": "stop"}
        assert engine.asked == 3
    finally:
        connections.close()
        await runner.cleanup()
