"""What the tap tells by itself, between two heartbeats: nobody asks it to look."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from bench.tap.watcher import tap_process
from rose_agent.tap.frames import Watch
from rose_core.telemetry.events import Arrived, Ended, FirstToken, Progress, TapEvent
from tests.tap.net import Namespace, Wire, namespace, refusal, tapped
from tests.telemetry.wire import END, HEAD, event, post

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap")
TOKENS = 50
_LONG_SECONDS = 60.0
_ROUND_SECONDS = 0.02  # the loop goes round and takes what lies ready


@pytest.fixture(scope="module")
def inside() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


@asynccontextmanager
async def listening(
    inside: Namespace, *, closely: bool
) -> AsyncIterator[tuple[Wire, list[TapEvent]]]:
    """A connection, and what the tap says about it without a heartbeat."""
    told: list[TapEvent] = []
    with tapped(inside) as tap:
        tap.replica.watch = msgspec.structs.replace(tap.replica.watch, closely=closely)
        tap.replica.start(told.extend)
        wire = Wire(inside, tap)
        try:
            yield wire, told
        finally:
            wire.close()
            tap.replica.close()


async def heard(told: list[TapEvent], kind: type) -> TapEvent:
    async with asyncio.timeout(_LONG_SECONDS):
        while True:
            found = [one for one in told if isinstance(one, kind)]
            if found:
                return found[-1]
            await asyncio.sleep(0.001)


async def test_arrivals_and_ends_are_told_at_once_and_tokens_wake_nobody(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=False) as (wire, told):
        wire.say(post())
        await heard(told, Arrived)
        wire.answer(HEAD)
        await asyncio.sleep(_ROUND_SECONDS)
        before = len(told)
        wire.answer(*[event(0)] * TOKENS)
        await asyncio.sleep(_ROUND_SECONDS)
        assert len(told) == before
        wire.answer(END)
        ended = await heard(told, Ended)
        assert isinstance(ended, Ended)
        assert ended.tokens == TOKENS


async def test_a_first_token_that_nobody_waits_for_comes_with_the_heartbeat(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=False) as (wire, told):
        wire.say(post())
        arrived = await heard(told, Arrived)
        wire.answer(HEAD)
        await asyncio.sleep(_ROUND_SECONDS)
        wire.answer(event(0))
        await asyncio.sleep(_ROUND_SECONDS)
        assert not any(isinstance(one, FirstToken) for one in told)
        first = next(one for one in wire.tap.replica.beat() if isinstance(one, FirstToken))
        assert isinstance(arrived, Arrived)
        assert first.time_ns > arrived.time_ns, "stamped by the kernel as it passed"


async def test_watched_closely_the_first_token_is_told_at_once_and_the_others_soon(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=True) as (wire, told):
        wire.say(post())
        wire.answer(HEAD)
        await asyncio.sleep(_ROUND_SECONDS)
        wire.answer(event(0))
        await heard(told, FirstToken)
        await asyncio.sleep(0.01)  # tokens are told apart from 5 ms on
        wire.answer(event(1))
        progress = await heard(told, Progress)
        assert isinstance(progress, Progress)
        assert progress.tokens == 2


async def test_the_end_of_a_body_of_known_length_is_told_at_once(inside: Namespace) -> None:
    async with listening(inside, closely=False) as (wire, told):
        wire.say(post())
        wire.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n")
        await heard(told, Arrived)
        wire.answer(b"x" * 10, b"y" * 10)
        await heard(told, Ended)


async def test_heartbeats_are_wanted_often_where_tokens_count_or_much_gathers(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=True) as (wire, _):
        assert wire.tap.replica.restless
    async with listening(inside, closely=False) as (wire, _):
        replica = wire.tap.replica
        replica.beat()
        idle = replica.restless
        assert not idle, "nothing passes"
        wire.say(post())
        wire.answer(HEAD, *[event(0)] * TOKENS)
        replica.beat()
        much = replica.restless
        assert much, "its sockets should be emptied sooner"
        replica.beat()
        calm = replica.restless
        assert not calm


async def test_a_replica_that_nobody_paces_by_tokens_is_heard_of_half_as_often(
    short_dir: Path,
) -> None:
    between: dict[bool, float] = {}
    for closely in (True, False):
        watch = Watch("pod", 0, 1, interfaces=("lo",), closely=closely)
        async with tap_process(short_dir, watch) as (listener, _):
            beats = [(await listener.beat(0)).time_ns for _ in range(25)]
        gaps = [after - before for before, after in itertools.pairwise(beats)]
        between[closely] = statistics.median(gaps)
    assert 1.4 < between[False] / between[True] < 3
