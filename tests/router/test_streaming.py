"""Streams to callers: written where the tokens are read, whole for callers that read late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rose_dev.waiting import until
from rose_router import metrics, tls_layer
from rose_router.engines.fleet import Signal
from rose_router.http.replies import parts, streaming
from rose_router.listener import ConnectionLimits
from rose_router.turns.service import Service
from tests.router.conftest import Stage
from tests.router.test_connections import END, HEAD, asked, engine

Make = Callable[..., AbstractAsyncContextManager[Stage]]


# --- from an engine to a caller without a task in between


async def test_a_waiter_that_deals_with_it_asleep_is_told_of_every_fire_and_not_woken() -> None:
    signal, received = Signal(), list[int]()

    def asleep() -> bool:
        received.append(len(received))
        return len(received) < 3

    waiting = asyncio.create_task(signal.wait(asleep))
    await asyncio.sleep(0)
    for count in (1, 2, 3):
        signal.fire()
        assert len(received) == count  # in the moment of the fire
        await asyncio.sleep(0)
        assert waiting.done() is (count == 3)
    signal.fire()
    assert len(received) == 3


async def test_what_goes_wrong_asleep_is_the_waiters_and_not_of_whoever_fires() -> None:
    signal = Signal()
    broken = asyncio.create_task(signal.wait(lambda: bool(1 / 0)))
    fine = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    signal.fire()
    await fine
    with pytest.raises(ZeroDivisionError):
        await broken


async def test_pieces_are_handed_on_as_they_come_and_until_no_more_is_wanted() -> None:
    taken: list[bytes] = []

    async def pieces(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for piece in (b"one", b"two", b"end"):
            writer.write(b"3\r\n%b\r\n" % piece)
            await until(lambda piece=piece: taken[-1:] == [piece])  # type: ignore[misc]
        writer.write(END)

    def take(data: bytes, until: bytes = b"") -> bool:
        taken.append(data)
        return data != until

    async with engine(pieces) as (_, connections, place):
        connection = await asked(connections, place, take)
        assert taken == [b"one", b"two", b"end"]
        connection.leave()
        again = await asked(connections, place, lambda data: take(data, until=b"two"))
        assert taken[3:] == [b"one", b"two"]
        again.hang_up()


async def test_what_taking_a_piece_raises_comes_out_where_it_is_awaited() -> None:
    async def piece(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(b"1\r\nx\r\n")

    async with engine(piece) as (_, connections, place):
        with pytest.raises(ZeroDivisionError):
            await asked(connections, place, lambda _: bool(1 / 0))
        await until(lambda: not connections.open)


# --- callers


async def test_a_turn_that_ends_while_its_caller_does_not_read_is_whole_once_it_does(
    stage: Make,
) -> None:
    async with stage(limits=ConnectionLimits(write_seconds=60)) as s:
        await s.engine(token_seconds=0.0002)
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port, limit=1)
        body = b'{"input_ids":[1],"stream":true,"return_logprob":true,'
        body += b'"sampling_params":{"max_new_tokens":800,"ignore_eos":true}}'
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await until(lambda: s.router.service.ledger.totals.turns == 1)
        reply = b""
        while not reply.endswith(END):
            piece = await asyncio.wait_for(reader.read(65536), 30)
            assert piece
            reply += piece
        assert b'"completion_tokens":800' in reply
        assert b"data: [DONE]" in reply
        writer.close()


async def test_a_caller_of_http_1_0_gets_its_stream_without_chunks(stage: Make) -> None:
    async with stage() as s:
        await s.engine(token_seconds=0.0005)
        reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port)
        body = b'{"input_ids":[1],"stream":true,"sampling_params":{"max_new_tokens":20}}'
        writer.write(b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head, _, events = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        lines = events.split(b"\n\n")
        assert all(line.startswith(b"data: ") for line in lines if line)
        assert lines[-2:] == [b"data: [DONE]", b""]
        writer.close()


async def test_events_are_written_at_once_and_whole_where_a_socket_takes_a_part_or_nothing(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop keeps what its transports are given until all that has come is read."""
    written = list[int]()

    def write(socket: int, data: bytes) -> int:
        written.append(len(data))
        if len(written) % 3 == 0:
            raise BlockingIOError
        return os.write(socket, data[: len(data) // (len(written) % 3)])

    monkeypatch.setattr(tls_layer, "os", SimpleNamespace(write=write))
    async with stage() as s:
        await s.engine(token_seconds=0.005)
        body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 12}}
        async with s.post("/generate", body) as reply:
            lines = (await reply.read()).split(b"\n\n")
        again = {**body, "stream": False}  # over the same connection
        async with s.post("/generate", again) as reply:
            assert len((await reply.json())["output_ids"]) == 12
    counts = [json.loads(line[6:])["meta_info"]["completion_tokens"] for line in lines[:-2]]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert lines[-2:] == [b"data: [DONE]", b""]
    assert len(written) >= len(counts) - 1, "the head goes with the first event"


async def test_the_last_token_comes_with_the_end_and_not_twice(stage: Make) -> None:
    async with stage() as s:
        await s.engine(token_seconds=0.005)
        body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 6}}
        async with s.post("/generate", body) as reply:
            lines = (await reply.read()).split(b"\n\n")
    told = [json.loads(line[6:])["meta_info"] for line in lines[:-2]]
    *before, last = [(one["completion_tokens"], one["finish_reason"]) for one in told]
    assert last == (6, {"type": "length", "length": 6})
    assert all(count < 6 and finish is None for count, finish in before)


@pytest.mark.parametrize(("answers", "at_once"), [(1, True), (2, False)])
async def test_a_turn_alone_in_its_request_begins_at_once(
    stage: Make, monkeypatch: pytest.MonkeyPatch, answers: int, at_once: bool
) -> None:
    begun, submit = list[object](), Service.submit

    def noting(self: Service, *given: Any, **how: Any) -> Any:  # noqa: ANN401  # as the method's
        begun.append(how["at_once"])
        return submit(self, *given, **how)

    monkeypatch.setattr(Service, "submit", noting)
    async with stage() as s:
        await s.engine()
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "n": answers}}
        async with s.post("/generate", body) as reply:
            assert reply.status == 200
    assert begun == [at_once] * answers


async def test_a_caller_by_tls_is_written_to_by_its_transport() -> None:
    plain, tls = Mock(), Mock()
    plain.get_extra_info = {"socket": Mock(fileno=lambda: 7)}.get
    tls.get_extra_info = {"socket": Mock(fileno=lambda: 7), "sslcontext": object()}.get
    assert [tls_layer.plain_socket(one) for one in (plain, tls, None)] == [7, -1, -1]


async def streaming_caller(s: Stage) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """One that has sent its request and reads little ahead."""
    reader, writer = await asyncio.open_connection("127.0.0.1", s.router.http_port, limit=1)
    body = b'{"input_ids":[1],"stream":true,"sampling_params":{"max_new_tokens":6}}'
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    return reader, writer


async def test_a_caller_that_does_not_take_the_end_of_its_stream_is_cut_off(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is written by whoever reads the engine, who waits for nobody."""
    monkeypatch.setattr("rose_router.listener.LEAST_RATE", 1 << 40)
    monkeypatch.setattr(streaming.Stream, "_rest", lambda _: bytes(64 << 20))
    name = "rose_router_unread_answers_total"
    before = metrics.REGISTRY.get_sample_value(name)
    async with stage(limits=ConnectionLimits(write_seconds=0.1)) as s:
        await s.engine(token_seconds=0.002)
        _, writer = await streaming_caller(s)
        await until(lambda: metrics.REGISTRY.get_sample_value(name) != before)
        writer.transport.abort()


@pytest.mark.parametrize("broken", [2, 3], ids=["an event", "the end"])
async def test_no_answer_of_an_error_stands_within_a_stream_that_has_begun(
    stage: Make, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """Written whole are the first event, the second for its template, and the end."""
    written, events = list[object](), parts.sglang

    def breaks(*given: Any) -> object:  # noqa: ANN401  # as the events'
        written.append(given)
        return events(*given) if len(written) < broken else 1 / 0

    monkeypatch.setattr(parts, "sglang", breaks)
    async with stage() as s:
        await s.engine(token_seconds=0.005)
        reader, writer = await streaming_caller(s)
        with contextlib.suppress(ConnectionResetError):
            received = b""
            while piece := await asyncio.wait_for(reader.read(65536), 30):
                received += piece
        assert received.count(b"HTTP/1.1") == 1
        assert b"500 Internal" not in received
        assert not received.endswith(END)
        writer.close()
