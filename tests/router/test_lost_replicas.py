"""A replica that dies over a request which another has passed on to it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
import pytest

from rose_core.rollouts.capacity.replicas import home_of
from rose_dev.process_testing import CLI, spawn_process
from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from rose_router.engines import attach
from rose_router.replicas import peer_health, peers
from rose_router.replicas.peers import Peer
from tests.router.conftest import LEASE, VERSION, Stage
from tests.router.test_http import PROMPT, ask
from tests.router.test_process import answers, ports

Make = Callable[..., AbstractAsyncContextManager[Stage]]
KEY = next(key for key in map(str, range(1000)) if home_of(key, ("one", "two")) == "two")

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
ROWS_HEAD = STREAM_HEAD.replace(b"text/event-stream", b"application/json")


@asynccontextmanager
async def dying(text: bytes) -> AsyncIterator[str]:
    """Somebody who reads a request, says this much and dies; the URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def hanging(text: bytes) -> AsyncIterator[str]:
    """Somebody who takes every connection, says this much and then nothing; the URL."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"POST"):
            writer.write(text)
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        gone.set()
        server.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are asked, and given up, at once."""
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(peer_health, "ANSWER_SECONDS", 0.1)


@asynccontextmanager
async def beside(stage: Make, url: str, attach: str = "127.0.0.1:9") -> AsyncIterator[Stage]:
    """Replica ``one``, which believes that ``two`` is there."""

    async def resolve() -> list[Peer]:
        return [Peer("one", "", ""), Peer("two", url, attach)]

    async with stage(replica="one", replicas=resolve) as s:
        yield s


async def whole(s: Stage, most: int = 12) -> list[int]:
    """The output of a turn whose home is ``two``."""
    async with s.post("/generate", ask(most, session_id=KEY)) as reply:
        assert reply.status == 200, await reply.text()
        output: list[int] = (await reply.json())["output_ids"]
        return output


async def read_into(seen: list[bytes], reply: aiohttp.ClientResponse) -> None:
    while chunk := await reply.content.readany():
        seen.append(chunk)


@pytest.mark.parametrize(
    "text", [b"", JSON_HEAD, JSON_HEAD + b'{"text"', ROWS_HEAD, ROWS_HEAD + b'7\r\n{"text"\r\n']
)
async def test_a_replica_that_dies_before_its_answer_is_whole_costs_the_caller_nothing(
    stage: Make, text: bytes
) -> None:
    async with dying(text) as url, beside(stage, url) as s:
        await s.engine("e", cap=8)
        assert await whole(s) == continuation(PROMPT, 12, VERSION)


async def test_a_stream_that_has_not_begun_comes_from_another_replica(stage: Make) -> None:
    async with dying(STREAM_HEAD) as url, beside(stage, url) as s:
        await s.engine("e", cap=8)
        async with s.post("/generate", ask(session_id=KEY, stream=True)) as reply:
            lines = [line async for line in reply.content if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    assert json.loads(lines[-2][6:])["output_ids"] == continuation(PROMPT, 12, VERSION)


async def test_a_stream_that_has_begun_says_why_it_is_cut_and_is_never_whole(stage: Make) -> None:
    event = b'data: {"text":"x"}\n\n'
    reported = STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event), event)
    async with dying(reported) as url, beside(stage, url) as s:
        await s.engine("e", cap=8)
        seen: list[bytes] = []
        async with s.post("/generate", ask(session_id=KEY, stream=True)) as reply:
            assert reply.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_into(seen, reply)
        first, last = b"".join(seen).strip().split(b"\n\n")
        assert first == event.strip()
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"], error["retry_after"]) == (503, "ReplicaLost", 1)
        assert await whole(s) == continuation(PROMPT, 12, VERSION)


async def test_rows_in_pieces_are_cut_where_their_replica_dies_and_are_never_whole(
    stage: Make,
) -> None:
    piece = b'{"session":"s","rows":['
    reported = ROWS_HEAD + b"%x\r\n%b\r\n" % (len(piece), piece)
    async with dying(reported) as url, beside(stage, url) as s:
        seen: list[bytes] = []
        async with s.http.get(s.url + "/sessions/s/rows") as reply:
            assert (reply.status, reply.content_length) == (200, None)
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_into(seen, reply)
        assert b"".join(seen) == piece


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("text", [b"", JSON_HEAD, STREAM_HEAD])
async def test_a_replica_that_hangs_over_a_request_costs_the_caller_nothing(
    stage: Make, text: bytes
) -> None:
    async with hanging(text) as url, beside(stage, url) as s, asyncio.timeout(60):
        await s.engine("e", cap=8)
        assert await whole(s) == continuation(PROMPT, 12, VERSION)
        # Known to hang, it is not asked again.
        assert await whole(s) == continuation(PROMPT, 12, VERSION)


@pytest.mark.usefixtures("hasty")
async def test_a_stream_of_a_replica_that_hangs_says_why_it_is_cut(stage: Make) -> None:
    event = b'data: {"text":"x"}\n\n'
    reported = STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event), event)
    async with hanging(reported) as url, beside(stage, url) as s, asyncio.timeout(60):
        await s.engine("e", cap=8)
        seen: list[bytes] = []
        async with s.post("/generate", ask(session_id=KEY, stream=True)) as reply:
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_into(seen, reply)
    assert json.loads(b"".join(seen).split(b"data: ")[-1])["error"]["type"] == "ReplicaLost"


async def test_a_silent_replica_is_asked_on_and_comes_back() -> None:
    answers = False

    async def ask(_name: str) -> bool:
        return answers

    found = peer_health.PeerHealth(ask)
    await found.beat(["two"])
    assert not found.silent("two")  # one question may be lost
    await found.beat(["two"])
    assert found.silent("two")
    with pytest.raises(TimeoutError):
        async with found.awaiting("two"):
            await asyncio.Event().wait()
    answers = True
    await found.beat(["two"])
    async with found.awaiting("two"):
        assert not found.silent("two")


async def test_what_a_replica_passed_on_is_good_for_a_while_only(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "RELAY_SECONDS", 0.1)
    async with stage() as s:
        await s.engine("own")
        await s.engine("passed", relayed=True)
        fleet = s.router.service.fleet
        await until(lambda: not getattr(fleet.get("passed"), "gate_open", True))
        own = fleet.get("own")
        assert own is not None
        assert own.gate_open  # an owner's stream is its own proof


async def test_a_replica_that_lives_passes_on_even_what_has_not_changed(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "RELAY_BEAT_SECONDS", 0.02)
    async with stage() as two:
        received: list[object] = []
        fleet = two.router.service.fleet
        monkeypatch.setattr(fleet, "apply", lambda update, stream: received.append(update))

        async def resolve() -> list[Peer]:
            return [Peer("one", "", ""), Peer("two", two.url, f"127.0.0.1:{port}")]

        port = two.router.attach_port
        async with stage(replica="one", replicas=resolve) as one:
            await one.engine("e")
            await until(lambda: len(received) > 3 and received[-1] == received[-2])


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_stopped_replica_gives_its_turn_to_the_one_that_passed_it_on(
    stage: Make, end: signal.Signals
) -> None:
    child = await spawn_process(
        *(CLI, "router", f"--lease={LEASE}"),
        *("--http-address=127.0.0.1:0", "--attach-address=127.0.0.1:0"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(120):
            http, attach = await ports(child)
        there = f"http://127.0.0.1:{http}"
        async with beside(stage, there, f"127.0.0.1:{attach}") as s, asyncio.timeout(120):
            engine = await s.engine("e", cap=8, token_seconds=0.01)
            while not await answers(s.http, f"{there}/ready"):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.05)
            asked = asyncio.create_task(whole(s, most=300))
            await until(lambda: bool(engine.scheduler.running))
            assert not len(s.router.service.ledger)  # the turn is the other one's
            child.send_signal(end)
            assert await asked == continuation(PROMPT, 300, VERSION)
            assert s.router.service.ledger.totals.turns == 1
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
