"""Turns between router and engine over TLS: a handshake, an impostor, a new certificate."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rose_agent.guard.links.routerlink import update_of
from rose_agent.host import main
from rose_agent.host.options.arguments import parser
from rose_agent.host.route.data_certificate import OVERLAP_SECONDS, RENEWED_SECONDS, DataCertificate
from rose_agent.host.route.proxy import DataProxy, Target
from rose_agent.os.freezers import detect
from rose_core.rollouts.transcripts.transcript import StreamEvent
from rose_core.wire.host import HostStatusRequest
from rose_router.engines import engine_client
from rose_router.engines.connections import Connections
from rose_router.engines.engine_client import HttpEngineClient
from rose_router.errors import LegLost
from rose_router.http.tokenizer.model_tokenizer import over_http
from tests.agent.test_guard import GRANT
from tests.host.helpers import TOKEN, guarding, order, serving

EVENT = (
    b'data: {"output_ids": [7], "text": "a", "meta_info": {"completion_tokens": 1, '
    b'"finish_reason": {"type": "stop"}, "weight_version": "r@1.1"}}\n\ndata: [DONE]\n\n'
)
PROMPT = {"input_ids": [31_337, 31_338], "rid": "mine", "stream": True}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Wire:
    """Everything that passes between router and host."""

    port: int = 0
    seen: bytearray = field(default_factory=bytearray)

    @asynccontextmanager
    async def before(self, target: int) -> AsyncIterator[Wire]:
        joined = set[asyncio.Task[None]]()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(65_536):
                    self.seen += piece
                    writer.write(piece)
                writer.close()

        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
            try:
                await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
            finally:
                for one in (writer, far_writer):
                    one.transport.abort()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            joined.add(asyncio.create_task(join(reader, writer)))

        server = await asyncio.start_server(begin, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            # A router keeps its connections for the next turn: they would outlive the loop.
            for one in joined:
                one.cancel()
            await asyncio.gather(*joined, return_exceptions=True)


@dataclass
class Node:
    """A host's data route with an engine behind it, and what the engine was asked."""

    port: int
    asked: list[dict[str, Any]]


@asynccontextmanager
async def node(tls: ssl.SSLContext | None) -> AsyncIterator[Node]:
    asked: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(body=EVENT, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    target = Target(
        f"http://127.0.0.1:{runner.addresses[0][1]}",
        TOKEN,
        lambda _: None,
        tokenizer=lambda: b"files",
    )
    proxy = DataProxy({"slot-1": target}.get)
    try:
        yield Node(await proxy.start("127.0.0.1", 0, tls), asked)
    finally:
        await proxy.stop()
        await runner.cleanup()


@pytest.fixture
def connections() -> Iterator[Connections]:
    made = Connections()
    yield made
    made.close()


def route(port: int, certificates: tuple[str, ...] = ()) -> engine_client.Target:
    scheme = "https" if certificates else "http"
    return engine_client.Target(f"{scheme}://127.0.0.1:{port}/slots/slot-1", TOKEN, certificates)


async def turn(connections: Connections, target: engine_client.Target) -> list[int]:
    """Token ids of one leg."""
    found: list[int] = []

    def take(events: Iterable[StreamEvent]) -> bool:
        found.extend(token for event in events for token in event.ids)
        return True

    await HttpEngineClient(connections).stream(target, PROMPT, take)
    return found


async def test_a_turn_passes_and_whoever_reads_the_wire_sees_neither_ids_nor_token(
    connections: Connections,
) -> None:
    kept = DataCertificate()
    async with node(kept.context) as there, Wire().before(there.port) as wire:
        assert await turn(connections, route(wire.port, kept.announced())) == [7]
        assert there.asked[0]["input_ids"] == PROMPT["input_ids"]
        assert wire.seen
        assert b"31337" not in wire.seen
        assert TOKEN.encode() not in wire.seen
    async with node(None) as plain, Wire().before(plain.port) as open_wire:
        assert await turn(connections, route(open_wire.port)) == [7]
        assert b"31337" in open_wire.seen, "the search looks where it would stand"


async def test_an_impostor_is_told_nothing(connections: Connections) -> None:
    """Also one who speaks plain text there, and one whose certificate an authority would sign."""
    real, impostor = DataCertificate(), DataCertificate()
    async with node(impostor.context) as there:
        with pytest.raises(LegLost, match="its node has not told us of") as refused:
            await turn(connections, route(there.port, real.announced()))
        assert refused.value.unsent
        assert there.asked == []
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ServerFingerprintMismatch):
                await over_http(http)(route(there.port, real.announced()), 1 << 20)
    async with node(None) as plain:
        with pytest.raises(LegLost):
            await turn(connections, route(plain.port, real.announced()))
        assert plain.asked == []


async def test_turns_go_on_while_a_host_changes_its_certificate(connections: Connections) -> None:
    clock = Clock()
    kept = DataCertificate(clock)
    async with node(kept.context) as there, aiohttp.ClientSession() as http:

        async def works(certificates: tuple[str, ...]) -> None:
            fresh = Connections()
            target = route(there.port, certificates)
            assert await turn(fresh, target) == [7]
            assert await over_http(http)(target, 1 << 20) == b"files"
            fresh.close()

        first = kept.announced()
        await works(first)
        clock.now += RENEWED_SECONDS
        both = kept.announced()
        assert both[0] == first[0]
        assert len(both) == 2
        await works(first)
        await works(both)
        clock.now += OVERLAP_SECONDS
        last = kept.announced()
        assert last == both[1:]
        await works(both)
        await works(last)
        with pytest.raises(LegLost, match="has not told us of"):
            await turn(connections, route(there.port, first))
        clock.now += RENEWED_SECONDS - 1
        assert kept.announced() == last


async def test_a_host_says_its_certificate_and_the_guard_passes_it_on(
    rundir: Any,  # noqa: ANN401  # a fixture's path
    models: Any,  # noqa: ANN401
    connections: Connections,
) -> None:
    words = ("--rundir", str(rundir), "--models", str(models), "--data-tls")
    ports = ("--data-port", "0", "--http-port", "0", "--data-host", "127.0.0.1")
    freezer = detect("signals", scope=str(rundir))
    host = await main.start(parser().parse_args([*words, *ports]), freezer)
    try:
        with guarding(rundir):
            await host.host.ensure(order())
            await serving(host)
            result = await host.host.status(HostStatusRequest())
            (status,) = result.engines
            assert status.endpoint.startswith("https://127.0.0.1:")
            update = update_of(
                *(GRANT, status, TOKEN),
                gate_open=True,
                leaving=False,
                cap=1,
                certificates=result.certificates,
            )
            target = engine_client.Target.of(update)
            assert target.complaint() == ""
            assert await HttpEngineClient(connections).abort(target, "mine")
    finally:
        await host.stop(0.0)


@pytest.mark.parametrize(
    ("url", "certificates", "words"),
    [
        ("http://10.0.0.1:1", ("0" * 64,), "is not https"),
        ("https://10.0.0.1:1", ("0" * 63,), "64 lower-case hex digits"),
        ("https://10.0.0.1:1", ("0" * 64,), ""),
    ],
)
def test_a_certificate_that_is_none_is_refused(
    url: str, certificates: tuple[str, ...], words: str
) -> None:
    complaint = engine_client.Target(url, "t", certificates).complaint()
    assert (words in complaint) if words else not complaint
