"""Connections to engines: what is read whole, used again, hung up, and refused."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rose_dev.waiting import until
from rose_router.engines import connections as connecting
from rose_router.engines.connections import (
    SPARE_SECONDS,
    Connection,
    Connections,
    Place,
    Stage,
    Take,
    _context,
)
from rose_router.errors import Unreachable
from rose_wire.certificates import fingerprint, make_own

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
PLACE: Place = ("127.0.0.1", 1, False, ())

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """Answers every request on every connection alike."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.writers: list[asyncio.StreamWriter] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await self._answer(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def fine(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"1\r\nx\r\n" + END)


@asynccontextmanager
async def engine(
    answer: Answer, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Engine, Connections, Place]]:
    made, connections = Engine(answer), Connections()
    server = await asyncio.start_server(made, "127.0.0.1", 0, ssl=tls)
    try:
        yield made, connections, ("127.0.0.1", server.sockets[0].getsockname()[1], False, ())
    finally:
        connections.close()
        for writer in made.writers:
            writer.transport.abort()
        server.close()


async def asked(connections: Connections, place: Place, take: Take | None = None) -> Connection:
    return await connections.ask(place, b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", take)


async def whole(connection: Connection) -> bytes:
    body = b""
    while piece := await connection.chunk():
        body += piece
    connection.leave()
    return body


async def test_an_answer_in_single_bytes_is_read_whole_and_its_connection_used_again() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        for byte in HEAD + b"5\r\nhello\r\n6\r\n there\r\n" + END:
            writer.write(bytes([byte]))
            await writer.drain()

    async with engine(drip) as (made, connections, place):
        for _ in range(3):
            connection = await asked(connections, place)
            assert connection.status == 200
            assert await whole(connection) == b"hello there"
        assert len(made.writers) == 1


@pytest.mark.parametrize("take", [None, lambda _: True])
@pytest.mark.parametrize("status", [200, 413])
async def test_an_answer_that_comes_before_the_request_is_whole_is_seen(
    take: Take | None, status: int
) -> None:
    async def early(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 1\r\n\r\nx" % status)

    pieces = [b"y"] * 10_000
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(pieces)
    async with engine(early) as (_, connections, place), asyncio.timeout(30):
        connection = await connections.ask(place, head, take, pieces)
        assert connection.status == status


class Unsent(asyncio.Transport):
    """Has not sent all yet that it was given."""

    def __init__(self, end: socket.socket, unsent: int) -> None:
        super().__init__({"socket": end})
        self._unsent, self.given = unsent, b""

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.given += data


@pytest.mark.parametrize("unsent", [0, 5])
async def test_a_request_goes_out_at_once_but_never_before_what_was_not_sent_yet(
    unsent: int,
) -> None:
    """A long request may have been answered before it was taken whole."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection, transport = Connection(Connections(), PLACE), Unsent(ours, unsent)
        connection.connection_made(transport)
        connection.ask(b"POST")
        theirs.setblocking(False)
        if unsent:
            assert transport.given == b"POST"
        else:
            assert theirs.recv(9) == b"POST"
            assert not transport.given


async def test_an_engine_that_will_close_is_not_asked_again() -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")

    async with engine(close) as (made, connections, place):
        for _ in range(2):
            connection = await asked(connections, place)
            assert (connection.status, await whole(connection)) == (503, b"no")
        assert len(made.writers) == 2


async def test_what_follows_the_last_event_is_no_part_of_the_next_answer() -> None:
    done = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"4\r\nlast\r\n")
        await writer.drain()
        await done.wait()
        writer.write(b"4\r\ndone\r\n" + END)

    async with engine(late) as (made, connections, place):
        first = await asked(connections, place)
        assert await first.chunk() == b"last"
        first.leave()
        assert first.stage is Stage.ENDING
        done.set()
        await until(lambda: first.stage is Stage.IDLE)
        again = await asked(connections, place)
        assert again is first
        assert await whole(again) == b"lastdone"
        assert len(made.writers) == 1


async def test_hanging_up_ends_the_request_at_the_engine() -> None:
    async def forever(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"1\r\nx\r\n")

    async with engine(forever) as (made, connections, place):
        connection = await asked(connections, place)
        assert await connection.chunk() == b"x"
        connection.hang_up()
        await until(made.writers[0].is_closing)
        with pytest.raises(ConnectionResetError):
            await connection.chunk()


@pytest.mark.parametrize("answer", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
async def test_an_answer_that_is_none_is_a_lost_connection(answer: bytes) -> None:
    async def wrong(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with engine(wrong) as (_, connections, place):
        with pytest.raises(ConnectionResetError):
            await asked(connections, place)


async def test_an_idle_connection_that_the_engine_closes_is_forgotten() -> None:
    async def short(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")

    async with engine(short) as (made, connections, place):
        await whole(await asked(connections, place))
        made.writers[0].close()
        await until(lambda: not connections._idle)
        await whole(await asked(connections, place))
        assert len(made.writers) == 2


def own_tls(folder: Path) -> tuple[ssl.SSLContext, bytes]:
    """A server's TLS by a certificate of its own, as an engine host's; and the certificate."""
    key, certificate = make_own("host", dt.timedelta(hours=1), dt.datetime.now(dt.UTC))
    (folder / "both.pem").write_bytes(key + certificate)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "both.pem")
    return tls, certificate


async def test_a_connection_to_an_engines_host_outlives_the_pause_that_ends_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connecting, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(connecting, "SPARE_SECONDS", 60)  # one given back later is taken first
    tls, certificate = own_tls(tmp_path)
    async with engine(fine) as (_, _, plain), engine(fine, tls) as (host, connections, made):
        place = (*made[:2], True, (fingerprint(certificate),))
        kept, other = await asked(connections, place), await asked(connections, plain)
        assert [await whole(one) for one in (kept, other)] == [b"x", b"x"]
        kept.leave()
        other.leave()
        await until(lambda: other.stage is Stage.LOST)
        assert await asked(connections, place) is kept
        assert len(host.writers) == 1
        kept.hang_up()


async def test_who_comes_after_the_last_idle_one_was_taken_finds_another_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, certificate = own_tls(tmp_path)
    async with engine(fine, tls) as (host, connections, made):
        place = (*made[:2], True, (fingerprint(certificate),))
        first = await asked(connections, place)
        await until(lambda: bool(connections._idle.get(place)))
        (spare,) = connections._idle[place]
        await until(lambda: len(host.writers) == 2)
        monkeypatch.setattr(connecting, "SPARE_SECONDS", 0.5)  # by then both are given back
        assert await asked(connections, place) is spare
        for one in (first, spare):
            assert await whole(one) == b"x"
        await until(lambda: not connections._spares)
        assert len(host.writers) == 2, "nobody needs a third"


async def test_a_spare_that_nobody_takes_is_no_error_of_a_turn(tmp_path: Path) -> None:
    tls, _ = own_tls(tmp_path)
    async with engine(fine, tls) as (_, connections, made):
        place = (*made[:2], True, ("0" * 64,))
        with pytest.raises(Unreachable, match="certificate"):
            await asked(connections, place)
        await until(lambda: not connections._spares)
        assert not connections._idle


async def test_no_spare_is_opened_once_all_are_ended(tmp_path: Path) -> None:
    tls, certificate = own_tls(tmp_path)
    async with engine(fine, tls) as (host, connections, made):
        place = (*made[:2], True, (fingerprint(certificate),))
        await asked(connections, place)
        assert place in connections._spares
        connections.close()
        await asyncio.sleep(SPARE_SECONDS * 4)
        assert len(host.writers) == 1
        assert not connections.open


async def test_what_tls_keeps_of_a_connection_ends_with_it(tmp_path: Path) -> None:
    tls, certificate = own_tls(tmp_path)
    async with engine(fine, tls) as (_, connections, made):
        one = await asked(connections, (*made[:2], True, (fingerprint(certificate),)))
        layer = weakref.ref(one._transport)
        gc.disable()  # a full collection may be hours away
        try:
            one.hang_up()
            await until(lambda: layer() is None)
        finally:
            gc.enable()


async def asked_over_one_that_closes(seconds: float) -> int:
    """Ask over a kept connection that is closed so much later; how many were made in the end."""
    received = asyncio.Event()

    async def once(writer: asyncio.StreamWriter) -> None:
        if received.is_set():
            await asyncio.sleep(seconds)
            writer.close()
            received.clear()
        else:
            received.set()
            await fine(writer)

    async with engine(once) as (made, connections, place):
        await whole(await asked(connections, place))
        await whole(await asked(connections, place))
        return len(made.writers)


async def test_a_request_over_a_connection_that_was_closed_is_sent_once_more() -> None:
    assert await asked_over_one_that_closes(0) == 2


async def test_a_request_that_was_taken_is_not_sent_again_when_its_host_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rose_router.engines.connections.STALE_SECONDS", 0.01)
    with pytest.raises(ConnectionResetError):
        await asked_over_one_that_closes(0.05)


@pytest.mark.parametrize("error", [TimeoutError(110, "timed out"), OSError(113, "no route")])
async def test_a_host_that_falls_silent_is_out_of_reach_and_not_asked_again(error: OSError) -> None:
    received = asyncio.Event()

    async def first(writer: asyncio.StreamWriter) -> None:
        if not received.is_set():
            await fine(writer)
        received.set()

    async with engine(first) as (made, connections, place):
        await whole(await asked(connections, place))
        asking = asyncio.create_task(asked(connections, place))
        await asyncio.sleep(0)
        (kept,) = connections.open
        kept.connection_lost(error)  # as the kernel says when its probes stay without an answer
        with pytest.raises(Unreachable, match="gone silent"):
            await asking
        assert len(made.writers) == 1


async def test_the_kernel_asks_engines_hosts_whether_they_are_there_and_nobody_else(
    tmp_path: Path,
) -> None:
    tls, certificate = own_tls(tmp_path)
    async with engine(fine) as (_, _, plain), engine(fine, tls) as (_, connections, made):
        place = (*made[:2], True, (fingerprint(certificate),))
        asked_for = {}
        for one in (place, plain):
            connection = await asked(connections, one)
            assert connection._transport is not None
            made_socket = connection._transport.get_extra_info("socket")
            asked_for[one] = (
                bool(made_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)),
                made_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0,
            )
            connection.hang_up()
        assert asked_for == {place: (True, True), plain: (False, False)}


async def test_who_closes_awaits_no_more_ends_of_answers() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"4\r\nlast\r\n")

    async with engine(endless) as (_, connections, place):
        ending = await asked(connections, place)
        assert await ending.chunk() == b"last"
        ending.leave()
        stages = [ending.stage]
        connections.close()
        stages.append(ending.stage)
        assert stages == [Stage.ENDING, Stage.LOST]
        await until(lambda: not connections.open)


async def test_nobody_there_is_said_so() -> None:
    async with engine(lambda _writer: asyncio.sleep(0)) as (_, connections, place):
        pass
    with pytest.raises(Unreachable, match=str(place[1])):
        await asked(connections, place)


def test_only_who_asks_authorities_reads_them() -> None:
    pinned, believing = _context(pinned=True), _context(pinned=False)
    assert not pinned.cert_store_stats()["x509_ca"]
    assert pinned.verify_mode is ssl.CERT_NONE
    assert believing.verify_mode is ssl.CERT_REQUIRED
    assert believing.check_hostname
    assert pinned.minimum_version == believing.minimum_version
    assert pinned.options == believing.options
