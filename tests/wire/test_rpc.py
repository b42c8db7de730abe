"""Typed methods over a real gRPC connection: what arrives, and what each failure is called."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import msgspec
import pytest

from rose_wire.errors import MalformedMessage, Refused, Unavailable
from rose_wire.ports import free_port
from rose_wire.rpc import Method, Server, call, connect, converse, decode, receive


class Question(msgspec.Struct, frozen=True):
    text: str


class Answer(msgspec.Struct, frozen=True):
    length: int


class OtherQuestion(msgspec.Struct, frozen=True):
    text: int


MEASURE = Method("test.Service", "Measure", Question, Answer)
COUNT = Method("test.Service", "Count", Question, Answer)
TALK = Method("test.Service", "Talk", Question, Answer)
ECHO = Method("test.Service", "Echo", bytes, bytes)


async def measure(question: Question) -> Answer:
    if question.text == "forbidden":
        message = "that word is not allowed; use another"
        raise Refused(message)
    return Answer(len(question.text))


async def count(question: Question) -> AsyncIterator[Answer]:
    for length in range(len(question.text)):
        yield Answer(length)


async def talk(questions: AsyncIterator[Question]) -> AsyncIterator[Answer]:
    async for question in questions:
        yield Answer(len(question.text))


async def echo(block: bytes) -> bytes:
    return block


@asynccontextmanager
async def service(token: str = "", address: str = "127.0.0.1:0") -> AsyncIterator[grpc.aio.Channel]:
    server = Server(token=token)
    server.unary(MEASURE, measure)
    server.server_stream(COUNT, count)
    server.bidirectional(TALK, talk)
    server.unary(ECHO, echo)
    port = await server.start(address)
    target = address if address.startswith(("unix:", "local:")) else f"127.0.0.1:{port}"
    try:
        async with connect(target) as channel:
            yield channel
    finally:
        await server.stop()


async def questions(*texts: str) -> AsyncIterator[Question]:
    for text in texts:
        yield Question(text)


async def test_one_message_is_answered_by_one() -> None:
    async with service() as channel:
        assert await call(channel, MEASURE, Question("four"), timeout=10) == Answer(4)


async def test_one_message_is_answered_by_many() -> None:
    async with service() as channel:
        answers = [answer async for answer in receive(channel, COUNT, Question("abc"))]
    assert answers == [Answer(0), Answer(1), Answer(2)]


async def test_many_messages_are_answered_in_order() -> None:
    async with service() as channel:
        answers = [a async for a in converse(channel, TALK, questions("a", "bb", "ccc"))]
    assert answers == [Answer(1), Answer(2), Answer(3)]


async def test_who_sends_is_ended_where_the_peer_ends_the_stream() -> None:
    """Otherwise each router that is killed leaves a task with whoever owns an engine."""
    ended = asyncio.Event()

    async def waits() -> AsyncIterator[Question]:
        try:
            yield Question("a")
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with service(token="right") as channel:
        with pytest.raises(Refused, match="token"):
            _ = [a async for a in converse(channel, TALK, waits(), token="wrong")]
    assert ended.is_set()


async def test_blocks_travel_as_they_are() -> None:
    block = bytes(range(256)) * 4096
    async with service() as channel:
        assert await call(channel, ECHO, block, timeout=10) == block


async def test_a_unix_socket_works_like_a_port(tmp_path: Path) -> None:
    async with service(address=f"unix:{tmp_path}/host.sock") as channel:
        assert await call(channel, MEASURE, Question("x"), timeout=10) == Answer(1)


async def test_a_refusal_carries_the_reason() -> None:
    async with service() as channel:
        with pytest.raises(Refused, match="use another"):
            await call(channel, MEASURE, Question("forbidden"), timeout=10)


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_wrong_token_is_refused_on_every_kind_of_call(token: str) -> None:
    async def unary(channel: grpc.aio.Channel) -> None:
        await call(channel, MEASURE, Question("x"), timeout=10, token=token)

    async def stream(channel: grpc.aio.Channel) -> None:
        _ = [a async for a in receive(channel, COUNT, Question("x"), token=token)]

    async def both(channel: grpc.aio.Channel) -> None:
        _ = [a async for a in converse(channel, TALK, questions("x"), token=token)]

    kinds: list[Callable[[grpc.aio.Channel], Awaitable[None]]] = [unary, stream, both]
    for kind in kinds:
        async with service(token="right") as channel:
            with pytest.raises(Refused, match="token"):
                await kind(channel)


async def test_the_right_token_is_accepted() -> None:
    async with service(token="right") as channel:
        reply = await call(channel, MEASURE, Question("x"), timeout=10, token="right")
    assert reply == Answer(1)


async def test_a_message_of_another_type_is_refused_and_named() -> None:
    wrong = Method(MEASURE.service, MEASURE.name, OtherQuestion, Answer)
    async with service() as channel:
        with pytest.raises(Refused, match="not a Question"):
            await call(channel, wrong, OtherQuestion(1), timeout=10)


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with connect(f"127.0.0.1:{free_port()}") as channel:
        with pytest.raises(Unavailable, match="Measure"):
            await call(channel, MEASURE, Question("x"), timeout=5)


async def test_an_address_in_use_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = Server()
        with pytest.raises(Unavailable, match=address):
            await server.start(address)
        await server.stop()


def test_garbage_is_a_malformed_message() -> None:
    with pytest.raises(MalformedMessage, match="not a Question"):
        decode(Question, b"\xc1\xff")


class StallingWire:
    """A way to a server that carries nothing any more once it is stalled."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._moving = asyncio.Event()
        self._moving.set()

    def stall(self) -> None:
        self._moving.clear()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._one_way(reader, there[1]), self._one_way(there[0], writer))
        finally:
            there[1].close()
            writer.close()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(1 << 16):
            await self._moving.wait()
            writer.write(block)
            await writer.drain()


@contextlib.asynccontextmanager
async def stalling() -> AsyncIterator[tuple[StallingWire, grpc.aio.Channel]]:
    server = Server()
    server.bidirectional(TALK, talk)
    wire = StallingWire(await server.start("127.0.0.1:0"))
    tasks: set[asyncio.Task[None]] = set()

    def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(wire.carry(reader, writer)))

    listener = await asyncio.start_server(carry, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield wire, connect(f"127.0.0.1:{port}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener.close()
        await server.stop()


async def test_a_channel_over_a_stalled_connection_is_closed_without_waiting_for_it() -> None:
    """So whoever hangs up in a loop that must go on (guard, router) waits for no peer."""
    written = 0

    async def large() -> AsyncIterator[Question]:
        nonlocal written
        while True:
            yield Question("x" * 500_000)
            written += 1

    async with stalling() as (wire, channel):
        conversation = converse(channel, TALK, large())
        assert await anext(conversation) == Answer(500_000)
        wire.stall()
        before = -1
        while before != written:  # until a write is under way that does not end
            before = written
            await asyncio.sleep(0.3)

        async def read() -> None:
            async for _ in conversation:
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        closing = asyncio.create_task(channel.close())
        await asyncio.sleep(0)
        assert closing.done()
        async with asyncio.timeout(20):
            await asyncio.wait({reading})
