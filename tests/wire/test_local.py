"""Calls inside a node, without gRPC: the same methods, the same errors."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rose_wire import local
from rose_wire.errors import MalformedMessage, Refused, Unavailable
from rose_wire.rpc import Method, Server, call, connect

PATIENCE = 30


class Question(msgspec.Struct, frozen=True):
    text: str


class Answer(msgspec.Struct, frozen=True):
    length: int


class OtherAnswer(msgspec.Struct, frozen=True):
    length: str


MEASURE = Method("test.Service", "Measure", Question, Answer)
MISREAD = Method("test.Service", "Measure", Question, OtherAnswer)
UNKNOWN = Method("test.Service", "Nothing", Question, Answer)
ECHO = Method("test.Service", "Echo", bytes, bytes)


class Service:
    """Answers with a length; ``wait`` until ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()
        self.given_up = asyncio.Event()

    async def measure(self, question: Question) -> Answer:
        if question.text == "wait":
            self.waiting.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.given_up.set()
                raise
        elif question.text == "forbidden":
            raise Refused("use another word")
        elif question.text == "away":
            raise Unavailable("the engine is away")
        elif question.text == "bug":
            raise KeyError("not foreseen")
        return Answer(len(question.text))


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[Service]:
    service, server = Service(), Server()

    async def echo(block: bytes) -> bytes:
        return block

    server.unary(MEASURE, service.measure)
    server.unary(ECHO, echo)
    await server.start(f"local:{path}")
    try:
        yield service
    finally:
        await server.stop(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


async def test_messages_are_answered_also_large_ones(path: Path) -> None:
    block = bytes(range(256)) * 4096
    async with listening(path), connect(f"local:{path}") as channel:
        assert await call(channel, MEASURE, Question("four"), timeout=PATIENCE) == Answer(4)
        assert await call(channel, ECHO, block, timeout=PATIENCE) == block


async def test_a_slow_call_holds_up_no_other_one(path: Path) -> None:
    async with listening(path) as service, connect(f"local:{path}") as channel:
        slow = asyncio.create_task(call(channel, MEASURE, Question("wait"), timeout=PATIENCE))
        await service.waiting.wait()
        assert await call(channel, MEASURE, Question("x"), timeout=PATIENCE) == Answer(1)
        service.go.set()
        assert await slow == Answer(4)


@pytest.mark.parametrize(
    ("word", "kind", "says"),
    [
        ("forbidden", Refused, "use another word"),
        ("away", Unavailable, "the engine is away"),
        ("bug", Refused, "not foreseen"),
    ],
)
async def test_what_a_handler_raises_is_raised_to_who_asked(
    path: Path, word: str, kind: type[Exception], says: str
) -> None:
    async with listening(path), connect(f"local:{path}") as channel:
        with pytest.raises(kind, match=says):
            await call(channel, MEASURE, Question(word), timeout=PATIENCE)


async def test_messages_that_are_not_what_was_agreed(path: Path) -> None:
    async with listening(path), connect(f"local:{path}") as channel:
        with pytest.raises(MalformedMessage):
            await call(channel, MISREAD, Question("x"), timeout=PATIENCE)
        with pytest.raises(Refused, match="no such method"):
            await call(channel, UNKNOWN, Question("x"), timeout=PATIENCE)


async def test_who_gives_up_ends_the_call_on_the_other_side_too(path: Path) -> None:
    async with listening(path) as service, connect(f"local:{path}") as channel:
        with pytest.raises(Unavailable, match="no answer"):
            await call(channel, MEASURE, Question("wait"), timeout=0.05)
        async with asyncio.timeout(PATIENCE):
            await service.given_up.wait()


async def test_a_lost_connection_ends_its_calls_on_both_sides(path: Path) -> None:
    async with listening(path) as service, connect(f"local:{path}") as channel:
        slow = asyncio.create_task(call(channel, MEASURE, Question("wait"), timeout=PATIENCE))
        await service.waiting.wait()
        await channel.close()
        with pytest.raises(Unavailable, match="ended"):
            await slow
        async with asyncio.timeout(PATIENCE):
            await service.given_up.wait()


async def test_it_connects_again_to_who_listens_now(path: Path) -> None:
    async with connect(f"local:{path}") as channel:
        with pytest.raises(Unavailable):
            await call(channel, MEASURE, Question("x"), timeout=PATIENCE)
        for _ in range(2):
            async with listening(path):
                assert await call(channel, MEASURE, Question("x"), timeout=PATIENCE) == Answer(1)
            os.unlink(path)  # noqa: PTH108  # pathlib is refused here
            with pytest.raises(Unavailable):
                await call(channel, MEASURE, Question("x"), timeout=PATIENCE)


async def test_bytes_that_are_no_frame_end_that_connection_only(path: Path) -> None:
    async with listening(path), connect(f"local:{path}") as channel:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as other:
            other.setblocking(False)
            await loop.sock_connect(other, str(path))
            await loop.sock_sendall(other, b"\xff" * 64)
            async with asyncio.timeout(PATIENCE):
                assert await loop.sock_recv(other, 1) == b""
        assert await call(channel, MEASURE, Question("x"), timeout=PATIENCE) == Answer(1)


@pytest.mark.parametrize("turns", range(6))
async def test_who_connects_while_it_stops_is_hung_up_on(path: Path, turns: int) -> None:
    """Else the socket would stay open, and its warning fail whichever test comes next."""
    server = local.LocalServer({})
    await server.start(path)
    with socket.socket(socket.AF_UNIX) as caller, warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        caller.connect(str(path))
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.stop(0)
        assert (await asyncio.to_thread(recv_until_closed, caller)) == b""
        gc.collect()
    assert left == []


def recv_until_closed(caller: socket.socket) -> bytes:
    caller.settimeout(PATIENCE)
    try:
        return caller.recv(1)
    except ConnectionResetError:  # nobody had accepted it
        return b""


async def test_only_our_user_may_connect(path: Path) -> None:
    async with listening(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116  # pathlib is refused here


async def test_a_token_is_refused_because_nobody_would_look_at_it(path: Path) -> None:
    with pytest.raises(ValueError, match="mode"):
        await Server(token="secret").start(f"local:{path}")


async def test_a_path_that_cannot_be_bound(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot listen"):
        await Server().start(f"local:{tmp_path}/no/such/folder")
