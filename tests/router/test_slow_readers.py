"""Callers that do not read their answer, whichever route's: waited for, then taken for gone."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import ssl
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from aiohttp import web

from rose_core.rollouts.conversations.message_tree import (
    MessageTree,
    PrefixMatch,
    Routing,
    TrainingRow,
    TurnRange,
)
from rose_core.rollouts.transcripts.spans import TokenSpan
from rose_dev.cluster.pki import Authority
from rose_dev.waiting import until
from rose_router import metrics
from rose_router.config import Settings
from rose_router.http.admission import memory
from rose_router.http.admission.memory import MemoryLimiter
from rose_router.http.routes import pages, rows
from rose_router.listener import (
    LEAST_RATE,
    ConnectionLimiter,
    ConnectionLimits,
    LimitedConnection,
)
from rose_router.main import running
from rose_router.slow_senders import Sender
from tests.router.test_listener import Make
from tests.wire.test_tls import issue

SECONDS = 60.0
LONG = {"text": "x" * (16 << 20)}


class Full(asyncio.Transport):
    """A transport whose caller reads nothing."""

    def __init__(self, unread: int) -> None:
        super().__init__()
        self.unread, self.aborted = unread, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True


class Inner(asyncio.Protocol):
    """What speaks HTTP."""

    paused = False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False


def behind(unread: int) -> tuple[Full, Inner, LimitedConnection]:
    doors = ConnectionLimiter(ConnectionLimits(write_seconds=SECONDS))
    inner, transport = Inner(), Full(unread)
    door = LimitedConnection(lambda: inner, doors, 0.0)
    assert doors.enter(door)
    door.connection_made(transport)
    door.pause_writing()
    return transport, inner, door


@pytest.mark.looptime
async def test_a_caller_that_reads_nothing_has_longer_for_a_longer_answer() -> None:
    transport, inner, door = behind(10 * LEAST_RATE)
    assert inner.paused
    await asyncio.sleep(SECONDS + 9)
    assert len(door.doors) == 1
    await asyncio.sleep(2)
    assert transport.aborted, "it has read nothing"
    assert len(door.doors) == 0


@pytest.mark.looptime
async def test_a_caller_that_has_caught_up_has_all_of_its_time_again() -> None:
    transport, inner, door = behind(LEAST_RATE)
    await asyncio.sleep(SECONDS)
    door.resume_writing()
    assert not inner.paused
    await asyncio.sleep(SECONDS)
    door.pause_writing()
    await asyncio.sleep(SECONDS)
    assert not transport.aborted
    door.connection_lost(None)
    await asyncio.sleep(SECONDS)
    assert not transport.aborted


@pytest.mark.looptime
async def test_who_left_an_answer_unread_for_as_long_makes_room_for_another() -> None:
    doors = ConnectionLimiter(ConnectionLimits(connections=1, write_seconds=SECONDS))
    door, transport = LimitedConnection(Inner, doors, 0.0), Full(10)
    assert doors.enter(door)
    with socket.socket() as asking:
        door.sender = Sender(asking, encrypted=False)
        door.connection_made(transport)
        doors.note_whole(transport)
        doors.note_answered(transport)
        doors.clock += SECONDS - 1
        assert not doors.enter(LimitedConnection(Inner, doors, 0.0))
        doors.clock += 2
        assert doors.enter(LimitedConnection(Inner, doors, 0.0))
        assert transport.aborted


# --- real sockets


def caller(port: int, path: str, body: bytes | None = None) -> socket.socket:
    """One that asks and reads nothing; the kernel takes little for it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", port))
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\n"
    made.sendall(f"{head}Content-Length: {len(body or b'')}\r\n\r\n".encode() + (body or b""))
    return made


def unread() -> float:
    return next(iter(metrics.UNREAD.collect())).samples[0].value


def ask_on(caller: socket.socket, path: str) -> None:
    """Ask until the connection ends."""
    with contextlib.suppress(ConnectionError):
        while True:
            caller.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


TURN = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":1}}'


@pytest.mark.parametrize(
    ("path", "body"),
    [("/turns", None), ("/generate", TURN)],
    ids=["a page", "a turn's whole answer"],
)
async def test_no_answer_waits_for_a_caller_that_does_not_read(
    stage: Make, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes | None
) -> None:
    monkeypatch.setattr("rose_router.listener.LEAST_RATE", 1 << 40)
    monkeypatch.setattr("rose_router.http.replies.parts.sglang", lambda *_: LONG)
    monkeypatch.setattr(pages, "turns_json", lambda _: LONG)
    before = unread()
    async with stage(limits=ConnectionLimits(write_seconds=0.2)) as s:
        await s.engine(token_seconds=0)
        silent = await asyncio.to_thread(caller, s.router.http_port, path, body)
        await until(lambda: unread() == before + 1)
        silent.close()


async def test_many_short_answers_wait_no_longer(stage: Make) -> None:
    before = unread()
    async with stage(limits=ConnectionLimits(write_seconds=0.2)) as s:
        path = f"/v1/models/{'x' * 8000}"  # as long is the answer
        silent = await asyncio.to_thread(caller, s.router.http_port, path)
        await asyncio.wait_for(asyncio.to_thread(ask_on, silent, path), 60)
        assert unread() == before + 1
        silent.close()


async def cut_off(tls_dir: Path, trust: ssl.SSLContext) -> None:
    before = unread()

    def tls_caller(port: int) -> ssl.SSLSocket:
        spoken = trust.wrap_socket(
            socket.create_connection(("127.0.0.1", port)), server_hostname="localhost"
        )
        spoken.sendall(b"GET /turns HTTP/1.1\r\nHost: x\r\n\r\n")
        return spoken

    limits = ConnectionLimits(write_seconds=0.2)
    async with running(Settings(lease="team/run", limits=limits, http_tls_dir=tls_dir)) as made:
        silent = await asyncio.to_thread(tls_caller, made.http_port)
        await until(lambda: unread() == before + 1)
        silent.close()


def test_who_does_not_read_by_tls_is_cut_off_in_the_loop_that_routers_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """uvloop's own TLS asks nobody to wait who has written one long answer."""
    monkeypatch.setattr("rose_router.listener.LEAST_RATE", 1 << 40)
    monkeypatch.setattr(pages, "turns_json", lambda _: LONG)
    authority = Authority(tmp_path / "pki")
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(cut_off(issue(authority, tmp_path / "tls"), trust))


def filled(tree: MessageTree, turns: int, tokens: int) -> None:
    """A session with so many rows, with experts."""
    numbers = random.Random(1)
    for turn in range(turns):
        prompt = [numbers.randrange(1 << 17) for _ in range(tokens)]
        match = PrefixMatch(None, 0, (b"%d" % turn,))
        tree.note(
            *(("", "long"), f"t{turn}", match, prompt[:-2], {"role": "assistant"}),
            sampled=prompt[-2:],
            logprobs=[-0.5, math.nan],
            routing=Routing.of(bytes(8 * (tokens - 1)), tokens),
        )


class Grown(MessageTree):
    """A tree that has a long session from the beginning."""

    def __init__(self, *most: int) -> None:
        super().__init__(*most)
        filled(self, 40, 20_000)


async def test_rows_of_a_long_session_are_written_as_they_are_read(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_router.http.app.MessageTree", Grown)
    written, doors = [0], list[LimitedConnection]()
    write, entered = web.StreamResponse.write, ConnectionLimiter.enter

    async def counting(response: web.StreamResponse, piece: Any) -> None:  # noqa: ANN401  # its own
        written[0] += len(piece)
        await write(response, piece)

    def entering(limiter: ConnectionLimiter, door: LimitedConnection) -> bool:
        doors.append(door)
        return entered(limiter, door)

    monkeypatch.setattr(web.StreamResponse, "write", counting)
    monkeypatch.setattr(ConnectionLimiter, "enter", entering)
    before = unread()
    async with stage(limits=ConnectionLimits(write_seconds=1.0)) as s:
        async with s.http.get(s.url + "/sessions/long/rows") as reply:
            whole = await reply.read()
        assert len(msgspec.json.decode(whole)["rows"]) == 40
        assert written[0] >= len(whole) > 10 << 20
        written[0] = 0
        silent = await asyncio.to_thread(caller, s.router.http_port, "/sessions/long/rows")
        await until(lambda: doors[-1].behind is not None)
        transport = doors[-1].transport
        assert transport is not None
        assert transport.get_write_buffer_size() < 4 * LEAST_RATE
        await until(lambda: unread() == before + 1)
        assert written[0] < len(whole) / 2, "the rest was never made"
        silent.close()


def turn_of(place: int) -> TurnRange:
    return TurnRange(f"r{place}", place, place + 1, "stop", "log_softmax", None)


@pytest.mark.parametrize("tokens", [0, 1, 2047, 2048, 2049, 100_000])
async def test_pieces_are_one_json_whatever_their_length(tokens: int) -> None:
    ids = [token % 150_000 for token in range(tokens)]
    mask = bytearray(token % 2 for token in ids)
    logprobs = array("f", [-token / 7 if token % 2 else math.nan for token in ids])
    turns = tuple(map(turn_of, range(0, tokens, 2)))
    spans = tuple(TokenSpan("v", one.start, one.end) for one in turns)
    experts = random.Random(tokens).randbytes(16 * max(0, tokens - 1))
    row = TrainingRow(ids, mask, logprobs, spans, turns, Routing.of(experts, tokens, 3))
    made = list(rows.pieces("s", [row, row], {}))
    assert max(map(len, made)) < 2 * LEAST_RATE
    told = msgspec.json.decode(b"".join(made))
    assert told["session"] == "s"
    first, second = told["rows"]
    assert first == second
    assert (first["ids"], first["mask"]) == (ids, list(mask))
    assert first["logprobs"] == [None if math.isnan(one) else one for one in logprobs]
    assert [(one["start"], one["end"]) for one in first["weight_versions"]] == [
        (one.start, one.end) for one in spans
    ]
    assert [one["rid"] for one in first["turns"]] == [one.rid for one in turns]
    if tokens < 2:
        assert first["routed_experts"] is None
    else:
        assert msgspec.convert(first["routed_experts"]["data"], bytes) == experts
        assert first["routed_experts"] | {"data": ""} == {
            "data": "",
            "rows": tokens - 1,
            "row_bytes": 16,
            "recomputed": 3,
        }


# --- memory


async def test_long_pages_are_counted_until_they_are_read(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "turns_json", lambda _: LONG)
    monkeypatch.setattr(memory, "_LONG_ANSWER", 1 << 10)
    made = list[MemoryLimiter]()
    limiter = memory.MemoryLimiter.__init__

    def noting(self: MemoryLimiter, *given: Any) -> None:  # noqa: ANN401  # its own
        made.append(self)
        limiter(self, *given)

    monkeypatch.setattr(MemoryLimiter, "__init__", noting)
    # Three quarters of a half of it hold two such pages.
    async with stage(memory_bytes=100 << 20, limits=ConnectionLimits(write_seconds=30)) as s:
        monkeypatch.setattr(made[0], "_resident", lambda: 0)
        silent = [await asyncio.to_thread(caller, s.router.http_port, "/turns") for _ in range(2)]
        await until(lambda: made[0].taken >= 2 * len(LONG["text"]))
        async with s.http.get(s.url + "/turns") as reply:
            assert reply.status == 503
            assert int(reply.headers["Retry-After"])
        for path in ("/health", "/metrics"):  # which is longer than what is counted
            async with s.http.get(s.url + path) as reply:
                assert reply.status == 200
        for one in silent:
            one.close()
        await until(lambda: not made[0].taken)
        async with s.http.get(s.url + "/turns") as reply:
            assert len(await reply.read()) > len(LONG["text"])
