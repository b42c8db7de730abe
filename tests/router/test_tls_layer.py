"""TLS beneath connections to engines: all that is sent arrives, however it is cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose_router.tls_layer import TlsLayer
from tests.router.test_connections import own_tls


class Wire(asyncio.Transport):
    """What is sent waits here until it is carried over."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed, self.reading = bytearray(), False, True
        self.longest = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data
        self.longest = max(self.longest, len(data))

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return len(self.sent)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


@dataclass
class Above(asyncio.Protocol):
    """What speaks through TLS."""

    made: int = 0
    received: bytes = b""
    pieces: int = 0
    lost: list[Exception | None] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made += 1

    def data_received(self, data: bytes) -> None:
        self.pieces += 1
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class Server:
    """The other side, driven by hand."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)

    def shake_hands(self) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def read(self) -> bytes:
        received = b""
        try:
            while piece := self.tls.read(1 << 16):
                received += piece
        except ssl.SSLWantReadError:
            pass
        return received


def client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def taken(wire: Wire) -> bytes:
    data = bytes(wire.sent)
    wire.sent.clear()
    return data


@dataclass
class Pair:
    layer: TlsLayer
    wire: Wire
    above: Above
    server: Server

    def carry(self, step: int = 1 << 20) -> None:
        """Bring the layer what the server has sent, in pieces of that size."""
        data = self.server.outgoing.read()
        for place in range(0, len(data), step):
            self.layer.data_received(data[place : place + step])


def shaken(context: ssl.SSLContext, step: int = 1 << 20) -> Pair:
    wire, above, server = Wire(), Above(), Server(context)
    pair = Pair(TlsLayer(client(), "host", above), wire, above, server)
    pair.layer.connection_made(wire)
    server.incoming.write(taken(wire))
    assert not server.shake_hands()
    assert above.pieces == 0
    pair.carry(step)
    assert pair.layer.ready.done()
    server.incoming.write(taken(wire))
    assert server.shake_hands()
    assert above.made == 1
    return pair


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    return own_tls(tmp_path_factory.mktemp("tls"))[0]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    step=st.integers(1, 40_000),
    records=st.lists(st.integers(1, 40_000), min_size=1, max_size=4),
)
def test_all_that_is_sent_arrives_however_it_is_cut(
    context: ssl.SSLContext, step: int, records: list[int]
) -> None:
    async def run() -> None:
        pair = shaken(context, step)
        sent = b""
        for number, size in enumerate(records):
            data = bytes([65 + number]) * size
            for place in range(0, size, 1 << 14):
                pair.server.tls.write(data[place : place + (1 << 14)])
            sent += data
        pair.carry(max(step, 50))
        assert pair.above.received == sent
        pair.layer.write(sent)
        pair.server.incoming.write(taken(pair.wire))
        assert pair.server.read() == sent

    asyncio.run(run())


async def test_a_record_is_handed_on_in_one_piece_and_written_in_one(
    context: ssl.SSLContext,
) -> None:
    pair = shaken(context)
    pair.server.tls.write(b"event")
    pair.carry()
    assert (pair.above.received, pair.above.pieces) == (b"event", 1)
    pair.layer.write(b"request")
    assert pair.wire.sent
    pair.server.incoming.write(taken(pair.wire))
    assert pair.server.read() == b"request"


async def test_of_a_record_whose_last_byte_comes_alone_the_rest_is_handed_on_at_once(
    context: ssl.SSLContext,
) -> None:
    pair = shaken(context)
    pair.server.tls.write(b"x" * (1 << 14))
    data = pair.server.outgoing.read()
    pair.layer.data_received(data[:-1])
    pair.layer.data_received(data[-1:])
    assert pair.above.received == b"x" * (1 << 14)
    assert pair.above.pieces == 2


async def test_a_long_request_never_waits_as_a_whole(context: ssl.SSLContext) -> None:
    pair, sent = shaken(context), bytes(range(256)) * (1 << 14)
    pair.layer.write(sent)
    pair.server.incoming.write(taken(pair.wire))
    assert pair.server.read() == sent
    assert pair.wire.longest < len(sent) / 8


async def test_what_is_asked_when_tls_has_failed_is_lost_with_the_connection(
    context: ssl.SSLContext,
) -> None:
    pair = shaken(context)
    pair.layer.data_received(b"\x17\x03\x03\x00\x05wrong")
    pair.wire.closed = False
    pair.layer.write(b"request")  # before it has come to know
    assert pair.wire.closed
    assert not taken(pair.wire).startswith(b"\x17")


async def test_nothing_above_hears_of_a_side_that_is_not_trusted(context: ssl.SSLContext) -> None:
    wire, above, server = Wire(), Above(), Server(context)
    layer = TlsLayer(ssl.create_default_context(), "host", above)
    layer.connection_made(wire)
    server.incoming.write(taken(wire))
    server.shake_hands()
    layer.data_received(server.outgoing.read())
    with pytest.raises(ssl.SSLCertVerificationError):
        await layer.ready
    layer.connection_lost(None)
    assert wire.closed
    assert (above.made, above.lost) == (0, [])


async def test_a_side_that_leaves_in_the_handshake_is_an_error_of_it() -> None:
    above = Above()
    layer = TlsLayer(client(), "host", above)
    layer.connection_made(Wire())
    layer.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await layer.ready
    assert above.lost == []


async def test_the_end_of_tls_and_what_is_none_end_the_connection(context: ssl.SSLContext) -> None:
    for last in (b"", b"\x17\x03\x03\x00\x05wrong"):
        pair = shaken(context)
        pair.server.tls.write(b"all")
        if not last:
            with pytest.raises(ssl.SSLWantReadError):
                pair.server.tls.unwrap()
        pair.carry()
        pair.layer.data_received(last) if last else None
        assert pair.above.received == b"all"
        assert pair.wire.closed
        pair.layer.connection_lost(None)
        assert pair.above.lost == [None]
        pair.layer.write(b"more")
        assert not taken(pair.wire).startswith(b"more")


async def test_reading_is_stopped_at_the_transport(context: ssl.SSLContext) -> None:
    pair = shaken(context)
    pair.layer.pause_reading()
    assert not pair.wire.reading
    pair.layer.pause_reading()  # once more is no error
    pair.layer.resume_reading()
    assert pair.wire.reading


def test_layers_know_the_transports_below(tmp_path: Path) -> None:
    async def run() -> None:
        tls, _ = own_tls(tmp_path)
        pair = shaken(tls)
        assert pair.layer.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert pair.layer.get_extra_info("socket") is None

    asyncio.run(run())


# --- callers, who have dialled


@dataclass
class Caller:
    """A pair the other way round."""

    layer: TlsLayer
    wire: Wire
    above: Above
    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO

    def said(self) -> bytes:
        """What the layer has sent."""
        self.incoming.write(taken(self.wire))
        return self.tls.read(1 << 20)


def called(context: ssl.SSLContext) -> Caller:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client().wrap_bio(incoming, outgoing, server_hostname="host")
    wire, above = Wire(), Above()
    layer = TlsLayer(context, None, above)
    layer.connection_made(wire)
    while not above.made:
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        layer.data_received(outgoing.read())
        incoming.write(taken(wire))
    return Caller(layer, wire, above, tls, incoming, outgoing)


async def test_a_request_of_many_records_is_handed_on_in_one_piece(
    context: ssl.SSLContext,
) -> None:
    caller, sent = called(context), bytes(range(256)) * 400
    for place in range(0, len(sent), 1 << 14):
        caller.tls.write(sent[place : place + (1 << 14)])
    caller.layer.data_received(caller.outgoing.read())
    assert (caller.above.received, caller.above.pieces) == (sent, 1)
    caller.layer.write(b"answer")
    assert caller.said() == b"answer"
    caller.layer.write_now(b"event")  # the wire has no socket
    assert caller.said() == b"event"
    caller.layer.writelines([b"a", bytearray(b"b")])
    assert caller.said() == b"ab"


async def test_who_says_that_nothing_follows_is_told_the_same(context: ssl.SSLContext) -> None:
    caller = called(context)
    with pytest.raises(ssl.SSLWantReadError):
        caller.tls.unwrap()
    caller.layer.data_received(caller.outgoing.read())
    assert caller.wire.closed
    caller.incoming.write(taken(caller.wire))
    caller.tls.unwrap()


async def test_who_closes_says_that_nothing_follows_and_sends_no_more(
    context: ssl.SSLContext,
) -> None:
    caller = called(context)
    caller.layer.write(b"last")
    caller.layer.close()
    assert caller.layer.is_closing()
    caller.layer.close()
    caller.incoming.write(taken(caller.wire))
    assert caller.tls.read(10) == b"last"
    assert caller.tls.read(10) == b""
    caller.layer.write_now(b"more")
    assert not taken(caller.wire)


async def test_what_is_written_after_the_end_costs_nothing_of_what_was_before(
    context: ssl.SSLContext,
) -> None:
    caller, sent = called(context), bytes(1 << 20)
    caller.wire.abort = Mock()  # type: ignore[method-assign]
    caller.layer.write(sent)
    caller.layer.close()
    caller.layer.write(b"more")
    caller.layer.writelines([b"more"])
    caller.layer.write_now(b"more")
    caller.wire.abort.assert_not_called()
    caller.incoming.write(taken(caller.wire))
    received = 0
    while piece := caller.tls.read(1 << 20):
        received += len(piece)
    assert received == len(sent)


async def test_an_event_goes_past_the_transport_to_who_has_taken_all_before(
    context: ssl.SSLContext,
) -> None:
    caller, (ours, theirs) = called(context), socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        caller.layer._socket = ours.fileno()
        caller.layer.write_now(b"event")
        assert not caller.wire.sent
        caller.incoming.write(theirs.recv(1 << 16))
        assert caller.tls.read(10) == b"event"
        caller.layer.write_now(bytes(8 << 20))  # more than a socket takes
        assert caller.wire.sent
        received = 0
        theirs.setblocking(False)
        while received < 8 << 20:
            try:
                caller.incoming.write(theirs.recv(1 << 20))
            except BlockingIOError:
                caller.incoming.write(taken(caller.wire))
            while True:
                try:
                    received += len(caller.tls.read(1 << 20))
                except ssl.SSLWantReadError:
                    break
        assert received == 8 << 20
