"""Callers whose request comes in crumbs: how often they are heard, and that all of it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from rose_dev.cluster.pki import Authority
from rose_dev.waiting import until
from rose_router import metrics
from rose_router.listener import ConnectionLimiter, ConnectionLimits, LimitedConnection
from rose_router.slow_senders import IncomingBody, Sender, SlowSenders, low_water_mark
from tests.router.conftest import Stage
from tests.router.test_http import ask
from tests.wire.test_tls import issue

Make = Callable[..., AbstractAsyncContextManager[Stage]]
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
MOST_KEPT = 16_384


# --- the decision


@pytest.mark.parametrize(
    ("age", "limit", "missing", "mark"),
    [
        (0.9, 60.0, None, 1),  # it has just begun
        (0.0, 60.0, 500, 500),  # the kernel tells when it is whole
        (59.9, 60.0, 500, 500),
        (0.0, 60.0, 5_000_000, MOST_KEPT),
        (1.0, 60.0, None, MOST_KEPT),
        (59.1, 60.0, None, 1),  # whoever is whole now is not late
        (60.9, 60.0, None, 1),
        (70.0, 60.0, None, MOST_KEPT),  # a route without a limit
        (70.0, math.inf, None, MOST_KEPT),
        (0.9, 1.0, None, 1),
    ],
)
def test_how_much_must_have_come(age: float, limit: float, missing: int | None, mark: int) -> None:
    assert low_water_mark(age, 1.0, limit, missing) == mark


# --- turns, in virtual time


@dataclass
class Body:
    """A body that aiohttp puts together."""

    length: int
    total_bytes: int = 0

    def is_eof(self) -> bool:
        return self.total_bytes >= self.length


@dataclass
class Caller:
    """One that sends, and a loop that hears it when the kernel would say so."""

    slow: SlowSenders
    ours: socket.socket
    theirs: socket.socket
    unread: int = 0
    arrivals: list[float] = field(default_factory=list)
    waited: float = 0.0
    since: float | None = None

    def __post_init__(self) -> None:
        self.sender = Sender(self.ours)

    def send(self, count: int = 1) -> None:
        self.theirs.send(b"\n" * count)
        self.unread += count
        now = asyncio.get_running_loop().time()
        self.since = now if self.since is None else self.since

    def step(self) -> None:
        """Play one iteration of the event loop."""
        if not self.unread or self.unread < self.sender.mark:
            return
        now = asyncio.get_running_loop().time()
        self.arrivals.append(now)
        self.waited = max(self.waited, now - (self.since if self.since is not None else now))
        self.since = None
        count = len(self.ours.recv(1 << 20))
        self.unread -= count
        if isinstance(self.sender.body, Body):
            self.sender.body.total_bytes += count
        self.slow.note_bytes(self.sender, reading=True)


@contextlib.contextmanager
def callers(slow: SlowSenders, count: int) -> Iterator[list[Caller]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            ours.setblocking(False)
            made.append(Caller(slow, ours, theirs))
        yield made
        for one in made:
            slow.rest(one.sender)


async def _trickle(them: list[Caller], seconds: float, step: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        for one in them:
            one.send()
        for one in them:
            one.step()
        await asyncio.sleep(step)
        for one in them:  # who was let be heard by a turn meanwhile
            one.step()


@pytest.mark.looptime
async def test_heads_in_crumbs_are_heard_in_turns_of_sixteen() -> None:
    slow = SlowSenders(1.0)
    with callers(slow, 64) as them:
        for one in them:
            slow.begin(one.sender, 3600.0)
        await _trickle(them, 1.5, 0.05)
        for one in them:
            one.arrivals.clear()
            one.waited, one.since = 0.0, None
        assert len(slow) == len(them)
        await _trickle(them, 20.0, 0.05)
        received = sum(len(one.arrivals) for one in them)
        sent = 64 * 20 / 0.05
        assert received <= 16 * (20 / 0.1 + 1) < sent / 7
        assert max(one.waited for one in them) <= 0.1 * (64 / 16 + 1) + 0.05
        assert max(len(one.arrivals) for one in them) - min(len(one.arrivals) for one in them) <= 1


@pytest.mark.looptime
async def test_what_cannot_end_a_head_is_not_heard_at_its_turn() -> None:
    slow = SlowSenders(0.0)
    with callers(slow, 1) as (one,):
        slow.begin(one.sender, 60.0)
        slow.note_bytes(one.sender, reading=True)
        one.theirs.send(b"X-A: a\r")
        await asyncio.sleep(10)
        assert one.sender.mark == MOST_KEPT
        one.theirs.send(b"\n")
        await asyncio.sleep(0.2)
        assert one.sender.mark == 1


@pytest.mark.looptime
async def test_one_slow_head_alone_waits_for_a_tenth_of_a_second() -> None:
    slow = SlowSenders(1.0)
    with callers(slow, 1) as (one,):
        slow.begin(one.sender, 3600.0)
        await _trickle([one], 10.0, 0.01)
        assert 0.0 < one.waited <= 0.2


@pytest.mark.looptime
async def test_a_body_of_known_length_is_heard_when_it_is_whole_and_not_before() -> None:
    slow = SlowSenders(1.0)
    with callers(slow, 1) as (one,):
        slow.begin(one.sender, 60.0, Body(3000), 3000)
        slow.note_bytes(one.sender, reading=True)
        begun = len(one.arrivals)
        await _trickle([one], 20.0, 0.1)
        assert len(one.arrivals) == begun
        assert not len(slow)  # no turn would tell more
        one.send(one.sender.mark - one.unread - 1)
        one.step()
        assert len(one.arrivals) == begun
        one.send()
        one.step()
        assert len(one.arrivals) == begun + 1
        assert one.sender.begun is None
        assert one.sender.mark == 1


@pytest.mark.looptime
async def test_a_head_is_heard_to_the_last_byte_before_it_is_late() -> None:
    """However many wait for their turn."""
    slow = SlowSenders(1.0)
    with callers(slow, 400) as them:
        for one in them:
            slow.begin(one.sender, 5.0)
        await _trickle(them, 3.5, 0.25)
        assert len(slow) > 0
        await asyncio.sleep(0.7)
        for one in them:
            one.step()
        assert not len(slow)
        assert not any(one.unread for one in them)
        for one in them:
            one.send()
            one.step()
        assert not any(one.unread for one in them)


@pytest.mark.looptime
async def test_who_is_held_back_is_not_told_to_send_more_before_it_is_heard() -> None:
    slow = SlowSenders(1.0)
    with callers(slow, 1) as (one,):
        slow.begin(one.sender, 60.0, Body(100_000), 100_000)
        await asyncio.sleep(2)
        slow.note_bytes(one.sender, reading=True)
        assert one.sender.mark == MOST_KEPT
        slow.note_bytes(one.sender, reading=False)  # aiohttp has bytes that it does not count yet
        assert one.sender.mark == 1


@pytest.mark.looptime
async def test_who_hangs_up_has_no_turn() -> None:
    slow = SlowSenders(0.0)
    with callers(slow, 2) as (one, other):
        for caller in (one, other):
            slow.begin(caller.sender, 60.0)
            slow.note_bytes(caller.sender, reading=True)
        assert len(slow) == 2
        one.ours.close()
        slow.rest(one.sender)
        await asyncio.sleep(1)
        assert len(slow) == 1


# --- through a router


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each arrival of which a router's loop heard."""
    seen: list[int] = []
    received = LimitedConnection.data_received

    def note(door: LimitedConnection, data: bytes) -> None:
        seen.append(len(data))
        received(door, data)

    monkeypatch.setattr(LimitedConnection, "data_received", note)
    return seen


AT_ONCE = ConnectionLimits(patience_seconds=0.0)
"""Everything that is not whole is slow."""


async def _crumbs(writer: asyncio.StreamWriter, text: bytes, size: int = 1) -> None:
    for place in range(0, len(text), size):
        writer.write(text[place : place + size])
        await writer.drain()
        await asyncio.sleep(0.001)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(60):
        status = await reader.readline()
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        await reader.readexactly(length)
    return status


async def test_a_body_in_crumbs_wakes_the_loop_when_it_is_whole(
    stage: Make, arrivals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[None] = []
    note_head = ConnectionLimiter.note_head

    def note(
        doors: ConnectionLimiter,
        transport: asyncio.BaseTransport | None,
        body: IncomingBody,
        length: int | None,
        *,
        chunked: bool,
    ) -> None:
        note_head(doors, transport, body, length, chunked=chunked)
        heads.append(None)

    monkeypatch.setattr(ConnectionLimiter, "note_head", note)
    body = msgspec.json.encode(ask())
    async with stage() as s:
        await s.engine()
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        for _ in range(2):  # the second one on the same connection
            arrivals.clear()
            heads.clear()
            head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
            writer.write(head)
            await until(lambda: len(heads) == 1)
            await _crumbs(writer, body)
            assert b" 200 " in await _answer(reader)
            assert arrivals == [len(head), len(body)]
        writer.close()


async def test_a_head_in_crumbs_is_answered_and_heard_seldom(
    stage: Make, arrivals: list[int]
) -> None:
    head = b"GET /ping HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 400 + b"\r\n\r\n"
    async with stage(limits=AT_ONCE) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        for _ in range(2):
            arrivals.clear()
            await _crumbs(writer, head)
            assert b" 200 " in await _answer(reader)
            assert len(arrivals) < len(head) / 4
        writer.close()


async def test_a_head_in_crumbs_behind_a_turn_that_runs_is_heard_seldom(
    stage: Make, arrivals: list[int]
) -> None:
    head = b"GET /ping HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 400 + b"\r\n\r\n"
    body = msgspec.json.encode(ask())
    async with stage(limits=AT_ONCE) as s:
        await s.engine(token_seconds=3600)
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await _answer(reader)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)  # comes whole
        await until(lambda: len(s.router.service.ledger) == 1)
        arrivals.clear()
        await _crumbs(writer, head)
        assert len(arrivals) < len(head) / 4
        writer.close()


@pytest.mark.parametrize("size", [700, 9_000, 200_000])
async def test_a_long_body_is_whole_whatever_it_comes_in(stage: Make, size: int) -> None:
    body = msgspec.json.encode(ask())
    body = b" " * 900_000 + body
    async with stage(limits=AT_ONCE) as s:
        await s.engine()
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for place in range(0, len(body), size):
            writer.write(body[place : place + size])
            await writer.drain()
        assert b" 200 " in await _answer(reader)
        writer.close()


async def test_a_body_of_unknown_length_in_crumbs_is_answered(
    stage: Make, arrivals: list[int]
) -> None:
    body = msgspec.json.encode(ask())
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    async with stage(limits=AT_ONCE) as s:
        await s.engine()
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        await _crumbs(writer, chunks)
        assert b" 200 " in await _answer(reader)
        assert len(arrivals) < len(chunks) / 4
        writer.close()


async def test_a_compressed_body_in_crumbs_is_answered(stage: Make, arrivals: list[int]) -> None:
    """Its length says nothing of what it becomes, and it does not end with a line."""
    body = gzip.compress(msgspec.json.encode(ask()))
    assert not body.endswith(b"\n")
    limits = ConnectionLimits(body_seconds=3600.0, patience_seconds=0.0)
    async with stage(limits=limits) as s:
        await s.engine()
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body))
        await _crumbs(writer, body)
        assert b" 200 " in await _answer(reader)
        assert len(arrivals) < len(body) / 4
        writer.close()


async def test_crumbs_through_tls_are_answered_and_heard_seldom(
    stage: Make, arrivals: list[int], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "pki")
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    body = msgspec.json.encode(ask())
    async with stage(limits=AT_ONCE, http_tls_dir=issue(authority, tmp_path / "tls")) as s:
        await s.engine()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", s.router.http_port, ssl=trust, server_hostname="localhost"
        )
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        await _crumbs(writer, body)
        assert b" 200 " in await _answer(reader)
        writer.close()


async def test_who_hangs_up_amid_its_body_is_forgotten(stage: Make) -> None:
    async with stage(limits=AT_ONCE) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        writer.write(HEAD + b"X-A: ")
        await _crumbs(writer, b"aaaa")
        value = metrics.REGISTRY.get_sample_value
        await until(lambda: value("rose_router_slow_senders") == 1)
        writer.close()
        await until(lambda: value("rose_router_connections") == 0)
        assert value("rose_router_slow_senders") == 0
        assert reader.at_eof() or not await reader.read()


@pytest.mark.parametrize("rest", [b"Content-Length: 9999\r\n\r\n{", b"X-A: "])
async def test_who_is_too_slow_is_told_so(stage: Make, rest: bytes) -> None:
    limits = ConnectionLimits(head_seconds=0.8, body_seconds=0.8, patience_seconds=0.0)
    loop, reported = asyncio.get_running_loop(), b""
    async with stage(limits=limits) as s, asyncio.timeout(60):
        with socket.create_connection(("127.0.0.1", s.router.http_port)) as caller:
            caller.setblocking(False)
            await loop.sock_sendall(caller, HEAD + rest)
            while b"SlowCaller" not in reported:
                with contextlib.suppress(BlockingIOError):
                    reported += caller.recv(4096)  # what was said before a reset is still there
                    assert reported
                    continue
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(caller, b" ")
                await asyncio.sleep(0.01)
    assert reported.startswith(b"HTTP/1.1 408 ")


async def test_who_is_told_that_it_is_late_is_gone_soon_even_if_it_does_not_take_it(
    stage: Make, tmp_path: Path
) -> None:
    """TLS ends when both have said so, and such a connection counts no more."""
    authority = Authority(tmp_path / "pki")
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    loop, limits = asyncio.get_running_loop(), ConnectionLimits(head_seconds=0.4)
    async with stage(limits=limits, http_tls_dir=issue(authority, tmp_path / "tls")) as s:
        with socket.create_connection(("127.0.0.1", s.router.http_port)) as caller:
            caller.setblocking(False)
            came, going = ssl.MemoryBIO(), ssl.MemoryBIO()
            spoken = trust.wrap_bio(came, going, server_hostname="localhost")
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        spoken.do_handshake()
                        break
                    await loop.sock_sendall(caller, going.read())
                    came.write(await loop.sock_recv(caller, 1 << 16))
                spoken.write(HEAD)
                await loop.sock_sendall(caller, going.read())
            async with asyncio.timeout(15):  # half of what TLS waits for its other side
                with contextlib.suppress(ConnectionError):
                    while await loop.sock_recv(caller, 1 << 16):
                        pass
