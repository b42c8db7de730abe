"""A request that comes whole is answered past aiohttp's task, and its caller cannot tell."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web, web_protocol
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser
from aiohttp.http_parser import RawRequestMessage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose_dev.waiting import until
from rose_router.http import whole_requests
from rose_router.http.whole_requests import (
    PRIVATE_NAMES,
    KnownHeads,
    WholeRequestHandler,
    WholeRoute,
    lacking,
    resolve,
)
from tests.router.conftest import Stage

Staging = Callable[..., AbstractAsyncContextManager[Stage]]
BODY = b'{"say": 1}'


def request(
    body: bytes = BODY,
    *headers: str,
    path: str = "/turn",
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x", *headers]
    if not any(one.startswith(("Content-Length", "Transfer-Encoding")) for one in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Server:
    """aiohttp's application behind such connections.

    Attributes:
        whole: for each request that reached the handler, whether it came past aiohttp's task.
        hold: answers wait for it.
        cancelled: handlers that were.
        fail: what the handler raises.
        make: makes a connection.
    """

    port: int = 0
    make: Callable[[], WholeRequestHandler] | None = None
    routes: dict[str, WholeRoute] = field(default_factory=dict)
    heads: KnownHeads = field(default_factory=KnownHeads)
    whole: list[bool] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0
    fail: type[Exception] | None = None

    async def handle(self, asked: web.Request) -> web.StreamResponse:
        route = self.routes.get(asked.path)
        self.whole.append(route is not None and asked.match_info is route.match)
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fail is not None:
            raise self.fail
        return web.Response(body=await asked.read() + b" " + asked.path.encode())


@asynccontextmanager
async def serving(server: Server, keepalive: float = 60.0) -> AsyncIterator[Server]:
    app = web.Application()
    app.add_routes([web.post("/turn", server.handle), web.post("/other", server.handle)])
    app.add_routes([web.get("/turn", server.handle)])
    server.routes |= resolve(app, ["/turn"])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=30)
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    make = partial(
        WholeRequestHandler,
        runner.server,
        server.routes,
        server.heads,
        loop=loop,
        access_log=None,
        keepalive_timeout=keepalive,
    )
    server.make = make
    listening = await loop.create_server(make, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        await runner.cleanup()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """One answer with a length, as it came."""
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"Content-Length: (\d+)", head)
        return head + (await reader.readexactly(int(found[1])) if found else b"")


@asynccontextmanager
async def dialled(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose task of aiohttp waits already: its first request may come before that."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(b"", path="/nothing"))
        assert b" 404 " in await answer(reader)
        yield reader, writer
    finally:
        writer.close()


def free() -> Server:
    server = Server()
    server.hold.set()
    return server


async def test_requests_that_come_whole_are_answered_one_after_the_other() -> None:
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        for number in range(3):
            writer.write(request(b"%d" % number))
            assert (await answer(reader)).endswith(b"\r\n\r\n%d /turn" % number)
        assert server.whole == [True] * 3


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.bytes += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Stay open: what was written is read afterwards."""


async def test_the_first_request_is_not_kept_waiting_for_aiohttps_task() -> None:
    async with serving(Server()) as server:
        assert server.make is not None
        connection, written = server.make(), Written()
        connection.connection_made(written)
        connection.data_received(request(b"one"))
        assert server.whole == [True], "before anything else is done"
        assert connection.answers_whole
        connection.data_received(request(b"two"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert server.whole == [True], "the first is not answered yet"
        server.hold.set()
        await until(lambda: written.bytes.endswith(b"two /turn"))
        assert written.bytes.index(b"one /turn") < written.bytes.index(b"two /turn")
        connection.data_received(request(b"three"))
        await until(lambda: written.bytes.endswith(b"three /turn"))
        assert server.whole == [True, False, True]
        connection.connection_lost(None)


async def test_who_asks_again_at_once_is_not_kept_waiting_for_aiohttps_task() -> None:
    """It has not come to wait yet when a caller has its first answer and asks for the next."""
    async with serving(Server()) as server:
        assert server.make is not None
        connection, written = server.make(), Written()
        connection.connection_made(written)
        connection.data_received(request(b"one"))
        for _ in range(5):
            await asyncio.sleep(0)
        server.hold.set()
        for number, name in enumerate((b"one", b"two", b"three")):
            while not written.bytes.endswith(name + b" /turn"):  # noqa: ASYNC110  # each step
                await asyncio.sleep(0)
            assert server.whole == [True] * (number + 1)
            connection.data_received(request((b"two", b"three", b"four")[number]))
        await until(lambda: written.bytes.endswith(b"four /turn"))
        assert server.whole == [True] * 4
        connection.connection_lost(None)


async def test_a_caller_that_goes_before_aiohttps_task_has_begun_leaves_nothing() -> None:
    async with serving(Server()) as server:
        assert server.make is not None
        connection = server.make()
        connection.connection_made(Written())
        connection.data_received(request())
        connection.connection_lost(None)
        await until(lambda: server.cancelled == 1)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (request(b"", method="GET"), b" 200 "),
        (request(path="/other"), b" 200 "),
        (request(path="/turn?a=1"), b" 200 "),
        (request(b"2\r\nab\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), b" 200 "),
    ],
    ids=["another method", "another route", "a query", "chunks"],
)
async def test_other_requests_are_left_to_aiohttp(sent: bytes, text: bytes) -> None:
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        writer.write(sent)
        assert text in await answer(reader)
        assert server.whole == [False]
        writer.write(request())  # and the next one is not
        assert b" 200 " in await answer(reader)
        assert server.whole == [False, True]


async def test_a_request_in_two_pieces_is_left_to_aiohttp() -> None:
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        head, body = request().split(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        await until(lambda: len(server.whole) == 1)
        writer.write(body)
        assert (await answer(reader)).endswith(BODY + b" /turn")
        assert server.whole == [False]


async def test_who_expects_to_be_asked_for_the_body_is_asked() -> None:
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        writer.write(request(BODY, "Expect: 100-continue"))
        assert await answer(reader) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert b" 200 " in await answer(reader)
        assert server.whole == [False]


async def test_requests_in_one_piece_are_answered_in_their_order() -> None:
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        writer.write(request(b"a") + request(b"b"))
        assert (await answer(reader)).endswith(b"a /turn")
        assert (await answer(reader)).endswith(b"b /turn")
        assert server.whole == [False, False]


async def test_after_a_request_in_two_pieces_as_many_as_come_at_once_are_answered() -> None:
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        head, body = request().split(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        await until(lambda: len(server.whole) == 1)
        writer.write(body)  # of which aiohttp's parser thinks that it waits to be begun
        assert (await answer(reader)).endswith(BODY + b" /turn")
        numbers = range(2 * web_protocol.MAX_MSG_QUEUE_SIZE)
        writer.write(b"".join(request(b"%d" % number) for number in numbers))
        for number in numbers:
            assert (await answer(reader)).endswith(b"\r\n\r\n%d /turn" % number)


async def test_what_comes_beside_an_answer_is_answered_after_it() -> None:
    async with serving(Server()) as server, dialled(server.port) as (reader, writer):
        writer.write(request(b"a"))
        await until(lambda: server.whole == [True])
        writer.write(request(b"b", path="/other"))
        writer.write(request(b"c"))
        server.hold.set()
        for word in (b"a /turn", b"b /other", b"c /turn"):
            assert (await answer(reader)).endswith(word)


@pytest.mark.parametrize(
    "sent",
    [
        request(BODY, f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"),
        request(BODY, f"Content-Length: {len(BODY)}", "Content-Length: 1"),
        request(BODY, "Content-Length: +10"),
        request(BODY, "Bad Header: 1"),
        b"nonsense\r\n\r\n",
    ],
    ids=["both lengths", "two lengths", "a signed length", "a space in a name", "nonsense"],
)
async def test_what_two_servers_might_read_differently_is_refused(sent: bytes) -> None:
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        writer.write(sent + request())
        assert b" 400 " in await answer(reader)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                assert b" 200 " not in await reader.read()
        assert server.whole == []


@pytest.mark.parametrize(("version", "header"), [("1.0", "X: 1"), ("1.1", "Connection: close")])
async def test_a_connection_that_is_not_kept_is_closed_after_its_answer(
    version: str, header: str
) -> None:
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        writer.write(request(BODY, header, version=version))
        async with asyncio.timeout(60):
            assert (await reader.read()).endswith(BODY + b" /turn")
        assert server.whole == [True]


async def test_who_hangs_up_ends_his_request() -> None:
    async with serving(Server()) as server, dialled(server.port) as (_, writer):
        writer.write(request())
        await until(lambda: server.whole == [True])
        writer.close()
        await until(lambda: server.cancelled == 1)


async def test_a_server_that_ends_waits_for_answers() -> None:
    server = Server()
    async with contextlib.AsyncExitStack() as stack:
        async with serving(server):
            reader, writer = await stack.enter_async_context(dialled(server.port))
            writer.write(request())
            await until(lambda: server.whole == [True])
            asyncio.get_running_loop().call_soon(server.hold.set)
        assert (await answer(reader)).endswith(BODY + b" /turn")
        assert server.cancelled == 0


async def test_only_idle_connections_are_closed_for_being_idle() -> None:
    async with (
        serving(Server(), keepalive=0.05) as server,
        dialled(server.port) as (reader, writer),
        dialled(server.port) as (idle, _),
    ):
        writer.write(request())
        async with asyncio.timeout(60):
            assert await idle.read() == b""
        await until(lambda: server.whole == [True])
        server.hold.set()
        assert (await answer(reader)).endswith(BODY + b" /turn")
        async with asyncio.timeout(60):  # and then it is idle
            assert await reader.read() == b""


@pytest.mark.parametrize("fail", [ValueError, TimeoutError, web.HTTPConflict])
async def test_what_a_handler_raises_is_said_as_aiohttp_says_it(fail: type[Exception]) -> None:
    received = []
    for path in ("/turn", "/other"):
        server = free()
        server.fail = fail
        async with serving(server), dialled(server.port) as (reader, writer):
            writer.write(request(path=path))
            result = await answer(reader)
            received.append(re.sub(rb"Date: [^\r]*", b"", result))
        assert server.whole == [path == "/turn"]
    assert received[0] == received[1]


# --- what is aiohttp's own


class _Names(ast.NodeVisitor):
    """Names that begin with one underscore, of whatever object, in a class's code."""

    def __init__(self) -> None:
        self.found = set[str]()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found.add(node.attr)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.found.add(node.name)
        self.generic_visit(node)


def test_this_aiohttp_has_every_private_name_that_is_used() -> None:
    assert lacking() == []


def test_no_other_private_name_is_used_than_is_said() -> None:
    names = _Names()
    names.visit(ast.parse(inspect.getsource(WholeRequestHandler)))
    own = {name for name in vars(WholeRequestHandler) if not hasattr(web.RequestHandler, name)}
    private = {name for name in names.found if re.match(r"_[a-z]", name)}
    reported = frozenset[str]().union(*PRIVATE_NAMES.values())
    assert private - own == {name for name in reported if name.startswith("_")}
    assert reported <= names.found


async def test_without_one_of_them_aiohttp_answers_turns_by_itself(
    stage: Staging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later = {web.RequestHandler: frozenset({"_no_name_of_aiohttps"})}
    monkeypatch.setattr(whole_requests, "PRIVATE_NAMES", later)
    async with stage() as s:
        assert "has no RequestHandler._no_name_of_aiohttps" in caplog.text
        await s.engine()
        body: dict[str, object] = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 5},
        }
        result = await ask(s, body, whole=True)
    assert b" 200 OK" in result


# --- heads that were read before


async def read(data: bytes) -> tuple[RawRequestMessage, bytes]:
    """A request as aiohttp's parser reads it, and its body."""
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 16)
    ((message, payload),), _, _ = parser.feed_data(data)
    return message, await payload.read()


FIELDS = ("method", "path", "version", "raw_headers", "should_close", "compression", "upgrade")


def fields(message: RawRequestMessage) -> list[object]:
    read_of = [getattr(message, name) for name in (*FIELDS, "chunked", "url")]
    return [*read_of, list(message.headers.items())]


def learned(sent: bytes, message: RawRequestMessage) -> KnownHeads:
    heads, route = KnownHeads(), free()
    heads.learn(sent, message, WholeRoute(route.handle, cast("Any", None)))
    return heads


NAMES = st.sampled_from(["X-Length", "Authorization", "x-length", "Accept", "X-ength", "Cookie"])
VALUES = st.text(st.sampled_from("ab1 :;,=%ength"), max_size=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.sampled_from(["Content-Length", "content-length", "CONTENT-LENGTH"]),
    st.integers(0, 4),
    st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=300)),
    st.sampled_from(["1.0", "1.1"]),
)
async def test_a_head_that_is_known_is_what_the_parser_would_read(
    headers: list[tuple[str, str]], length: str, place: int, bodies: tuple[bytes, bytes], http: str
) -> None:
    lines = [f"{name}: {value}" for name, value in headers]

    def sent(body: bytes) -> bytes:
        with_length = [*lines[:place], f"{length}: {len(body)}", *lines[place:]]
        head = "\r\n".join([f"POST /turn HTTP/{http}", "Host: x", *with_length])
        return head.encode() + b"\r\n\r\n" + body

    first, then = sent(bodies[0]), sent(bodies[1])
    heads = learned(first, (await read(first))[0])
    for one in (first, then):
        if (known := heads.find(one)) is not None:
            message, body = await read(one)
            assert fields(known[0]) == fields(message)
            assert known[2] == body
    if not headers and length != "CONTENT-LENGTH":  # as no client writes it
        assert heads.find(first) is not None
        assert (heads.find(then) is not None) == bool(bodies[1])


@pytest.mark.parametrize(
    "changed",
    [
        (b"Content-Length: 10", b"Content-Length: 010"),
        (b"Content-Length: 10", b"Content-Length: +10"),
        (b"Content-Length: 10", b"Content-Length: 9"),
        (b"Content-Length: 10", b"Content-Length: 11"),
        (b"Content-Length: 10", b"Content-Length: "),
        (b"Content-Length: 10", b"Content-Length: 10\r\nContent-Length: 10"),
        (b"Content-Length: 10", b"Content-Length:10"),
        (b"Content-Length: 10", b"Content-length: 10"),
        (b"Content-Length: 10", b"Transfer-Encoding: chunked"),
        (b"Host: x", b"Host: y"),
        (b"\r\n\r\n", b"\r\n"),
    ],
)
async def test_a_head_that_differs_in_a_byte_is_left_to_the_parser(
    changed: tuple[bytes, bytes],
) -> None:
    sent = request()
    heads = learned(sent, (await read(sent))[0])
    assert heads.find(sent) is not None
    assert heads.find(sent.replace(*changed)) is None


@pytest.mark.parametrize(
    "sent",
    [
        request(BODY, "X-Length: 10", "Content-Length: 10"),
        request(BODY, "X-ength: 10"),
        request(BODY, f"X-Long: {'x' * 2048}"),
        request(b"x" * ((1 << 16) + 1)),
        request(BODY, "Content-Length:10"),
    ],
)
async def test_what_cannot_be_told_by_its_bytes_is_not_remembered(sent: bytes) -> None:
    assert not len(learned(sent, (await read(sent))[0]))


async def test_as_many_heads_are_kept_as_fit() -> None:
    sent = request()
    heads = learned(sent, (await read(sent))[0])
    route = WholeRoute(free().handle, cast("Any", None))
    for number in range(600):
        one = request(BODY, f"X-Name: {number}")
        heads.learn(one, (await read(one))[0], route)
    assert 0 < len(heads) <= 512


async def test_a_head_is_known_over_every_connection() -> None:
    async with serving(free()) as server:
        for number in range(4):
            body = b"x" * (number + 1)
            async with dialled(server.port) as (reader, writer):
                writer.write(request(body))
                assert (await answer(reader)).endswith(body + b" /turn")
        assert len(server.heads) == 1
        assert server.whole == [True] * 4


async def test_a_body_that_looks_like_a_request_teaches_nothing() -> None:
    """Else whoever sends one could say what the heads of others mean."""
    inner = request(BODY, "Authorization: Bearer other")
    outer = request(b"{}" + inner)
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        writer.write(outer[: -len(inner)])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(inner)
        assert (await answer(reader)).endswith(inner + b" /turn")
        assert not len(server.heads)
        writer.write(request())
        assert (await answer(reader)).endswith(BODY + b" /turn")
        assert not len(server.heads), "where its bytes begin is not sure over this connection"


async def test_a_known_head_in_the_middle_of_a_body_is_body() -> None:
    inner = request()
    async with serving(free()) as server, dialled(server.port) as (reader, writer):
        writer.write(inner)
        assert (await answer(reader)).endswith(BODY + b" /turn")
        assert len(server.heads) == 1
        outer = request(b"{}" + inner)
        writer.write(outer[: -len(inner)])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(inner)
        assert (await answer(reader)).endswith(b"{}" + inner + b" /turn")
        assert len(server.whole) == 2


# --- the router's own turns


async def ask(s: Stage, body: dict[str, object], *, whole: bool, path: str = "/generate") -> bytes:
    """What a caller reads, up to the end of the connection, without the date."""
    raw = msgspec.json.encode(body)
    sent = request(raw, "Content-Type: application/json", "Connection: close", path=path)
    reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
    writer.write(request(b"", path="/ping", method="GET"))
    await answer(reader)
    if whole:
        writer.write(sent)
    else:
        writer.write(sent[:-1])
        await until(lambda: not writer.transport.get_write_buffer_size())
        await asyncio.sleep(0.05)  # or it would come in one piece all the same
        writer.write(sent[-1:])
    async with asyncio.timeout(60):
        output = await reader.read()
    writer.close()
    return re.sub(rb"Date: [^\r]*", b"", output)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_reads_the_same_however_its_request_came(stage: Staging, stream: bool) -> None:
    async with stage() as s:
        await s.engine()
        body = {
            "rid": "once",
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 5},
            "stream": stream,
        }
        first = await ask(s, body, whole=True)  # the others get the same turn by its id
        assert b" 200 OK" in first
        again = [await ask(s, body, whole=whole) for whole in (True, False)]
        assert again[0] == again[1]
        if not stream:
            assert first == again[0]


@pytest.mark.parametrize(
    "body",
    [{}, {"input_ids": [-1]}, {"input_ids": [1], "stream": "x"}, {"input_ids": [1], "odd": 1}],
)
async def test_a_refusal_reads_the_same_however_its_request_came(
    stage: Staging, body: dict[str, object]
) -> None:
    async with stage() as s:
        await s.engine()
        whole, pieces = [await ask(s, body, whole=whole) for whole in (True, False)]
        assert whole == pieces
        assert re.match(rb"HTTP/1.1 4\d\d ", whole)
