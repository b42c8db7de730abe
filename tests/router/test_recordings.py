"""Streams of a real SGLang, byte by byte as recorded, through the router's reading of them.

Recorded with ROSE's plugin inside; ``new-tokens*`` with ``--incremental-streaming-output``, of
which ``-joined`` holds an event that SGLang made of two. All are of the same prompt and weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from rose_core.rollouts.transcripts.spans import TokenSpan
from rose_core.rollouts.transcripts.transcript import Leg, StreamEvent
from rose_core.wire.routing import EngineKind
from rose_engines.process.client import TurnClient
from rose_router.engines.connections import Connections
from rose_router.engines.engine_client import HttpEngineClient, Target

FOLDER = Path(__file__).parent / "recordings"
RECORDINGS = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.sse"))}
VERSION = "run@1.0"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PIECE = 700  # bytes, so that events come cut


@asynccontextmanager
async def playing(recording: bytes) -> AsyncIterator[str]:
    """An engine that answers with the recording; its URL."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for start in range(0, len(recording), PIECE):
            writer.write(recording[start : start + PIECE])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def contents(recording: bytes) -> tuple[list[int], list[float], str]:
    """Tokens, log-probs and text, told from the words of the recording alone."""
    frames = [line[6:] for line in recording.split(b"\n\n") if line.startswith(b"data: {")]
    bodies = [msgspec.json.decode(frame) for frame in frames]
    if len(bodies[-1]["output_ids"]) == bodies[-1]["meta_info"]["completion_tokens"]:
        bodies = bodies[-1:]
    pairs = [pair for body in bodies for pair in body["meta_info"]["output_token_logprobs"]]
    ids = [token for body in bodies for token in body["output_ids"]]
    return ids, [pair[0] for pair in pairs], "".join(body["text"] for body in bodies)


@pytest.mark.parametrize("name", RECORDINGS)
async def test_every_shape_gives_each_token_once_with_its_own_log_prob(name: str) -> None:
    recording = RECORDINGS[name]
    ids, logprobs, text = contents(recording)
    leg = Leg("e", EngineKind.BORROWED, "r", VERSION, 0)

    def take(events: Iterable[StreamEvent]) -> bool:
        for event in events:
            leg.take(event)
            assert leg.placed == len(leg.ids)  # the plugin's spans are in every event
        return True

    connections = Connections()
    async with playing(recording) as url:
        await HttpEngineClient(connections).stream(Target(url), {}, take)
    connections.close()
    pairs = leg.per_token["output_token_logprobs"]
    assert leg.ids == ids
    assert [pair[0] for pair in pairs] == logprobs
    assert [pair[1] for pair in pairs] == ids
    assert leg.placed_text == text
    assert leg.spans == (TokenSpan(VERSION, 0, len(ids)),)
    assert leg.complete != name.endswith("abort")


@pytest.mark.parametrize("name", RECORDINGS)
async def test_the_engines_own_client_reads_every_shape_alike(name: str) -> None:
    recording = RECORDINGS[name]
    ids, logprobs, text = contents(recording)
    async with playing(recording) as url, TurnClient(url) as client:
        events = [event async for event in client.stream([5], {})]
    assert events[-1].output_ids == tuple(ids)
    assert events[-1].logprobs == tuple(logprobs)
    assert events[-1].text == text
    for before, after in pairwise(events):
        assert after.output_ids[: len(before.output_ids)] == before.output_ids


def test_all_shapes_were_recorded() -> None:
    names = {"cumulative", "cumulative-abort", "new-tokens", "new-tokens-joined"}
    assert names <= RECORDINGS.keys()
