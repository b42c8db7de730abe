"""What the tap tells by itself, between two heartbeats: nobody asks it to look."""

from __future__ import annotations

import asyncio
import itertools
import socket
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest

from bench.tap.watcher import Listener, tap_process
from rose_agent.tap import frames, parser
from rose_agent.tap import replica as following
from rose_agent.tap.frames import TapWatch
from rose_core.identity import PodUid
from rose_core.telemetry.events import (
    PERIOD_NS,
    Arrived,
    Counted,
    Ended,
    FirstToken,
    Health,
    Progress,
    TapEvent,
    progress,
)
from tests.tap.net import READERS, Namespace, Wire, namespace, refusal, tapped
from tests.telemetry.wire import END, HEAD, event, post

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap")
TOKENS = 50
_STREAMED = 120
_LONG_SECONDS = 60.0
_ROUND_SECONDS = 0.02  # the loop goes round and takes what lies ready


@pytest.fixture(scope="module", params=READERS)
def inside(request: pytest.FixtureRequest) -> Iterator[Namespace]:
    with namespace(counting=request.param) as made:
        yield made


@asynccontextmanager
async def listening(
    inside: Namespace, *, closely: bool
) -> AsyncIterator[tuple[Wire, list[TapEvent]]]:
    """A connection, and what the tap says about it without a heartbeat."""
    received: list[TapEvent] = []
    with tapped(inside) as tap:
        tap.replica.watch = msgspec.structs.replace(tap.replica.watch, closely=closely)
        tap.replica.start(received.extend)
        wire = Wire(inside, tap)
        try:
            yield wire, received
        finally:
            wire.close()
            tap.replica.close()


def told_at_once(told: list[TapEvent]) -> bool:
    """Whether the heartbeat says that arrivals are told as they happen."""
    (beat,) = (one for one in told if isinstance(one, Health))
    return beat.at_once


def tokens_of(told: list[TapEvent]) -> list[int]:
    """What was told of the tokens of streams, one by one or as the kernel has them."""
    found: list[int] = []
    for one in told:
        if isinstance(one, Progress):
            found.append(one.tokens)
        elif isinstance(one, Counted):
            found += [tokens for _, tokens, _ in progress(one)]
    return found


async def first_event(received: list[TapEvent], kind: type, times: int = 1) -> TapEvent:
    async with asyncio.timeout(_LONG_SECONDS):
        while True:
            found = [one for one in received if isinstance(one, kind)]
            if len(found) >= times:
                return found[-1]
            await asyncio.sleep(0.001)


async def test_arrivals_and_ends_are_told_at_once_and_tokens_wake_nobody(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=False) as (wire, reported):
        wire.send(post())
        await first_event(reported, Arrived)
        wire.answer(HEAD)
        await asyncio.sleep(_ROUND_SECONDS)
        before = len(reported)
        wire.answer(*[event(0)] * TOKENS)
        await asyncio.sleep(_ROUND_SECONDS)
        assert len(reported) == before
        wire.answer(END)
        ended = await first_event(reported, Ended)
        assert isinstance(ended, Ended)
        assert ended.tokens == TOKENS


async def expect_first_token_with_the_heartbeat(wire: Wire, reported: list[TapEvent]) -> None:
    wire.send(post())
    arrived = await first_event(reported, Arrived)
    wire.answer(HEAD)
    await asyncio.sleep(_ROUND_SECONDS)
    wire.answer(event(0))
    await asyncio.sleep(_ROUND_SECONDS)
    assert not any(isinstance(one, FirstToken) for one in reported)
    first = next(one for one in wire.tap.replica.beat() if isinstance(one, FirstToken))
    assert isinstance(arrived, Arrived)
    assert first.time_ns > arrived.time_ns, "stamped by the kernel as it passed"


async def test_a_first_token_that_nobody_waits_for_comes_with_the_heartbeat(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=False) as (wire, reported):
        await expect_first_token_with_the_heartbeat(wire, reported)


async def test_watched_closely_the_first_token_is_told_at_once_and_others_with_the_heartbeat(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=True) as (wire, reported):
        wire.send(post())
        wire.answer(HEAD)
        await asyncio.sleep(_ROUND_SECONDS)
        wire.answer(event(0))
        await first_event(reported, FirstToken)
        before = len(reported)
        await asyncio.sleep(0.01)  # tokens are told apart from 5 ms on
        wire.answer(event(1))
        await asyncio.sleep(_ROUND_SECONDS)
        assert len(reported) == before, "nobody is woken between two periods"
        assert tokens_of(wire.tap.replica.beat())[-1] == 2


async def test_an_end_beside_others_under_way_waits_for_the_heartbeat_and_the_last_does_not(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=False) as (first, reported):
        second = Wire(inside, first.tap)
        for wire in (first, second):
            wire.send(post())
            wire.answer(HEAD, event(0))
        await asyncio.sleep(_ROUND_SECONDS)
        first.answer(END)
        await asyncio.sleep(_ROUND_SECONDS)
        assert not any(isinstance(one, Ended) for one in reported), "the gate stays closed anyway"
        second.answer(END)
        await first_event(reported, Ended)
        assert sum(isinstance(one, Ended) for one in reported) == 2
        second.close()


@pytest.mark.parametrize("closely", [False, True])
async def test_beside_others_a_first_token_wakes_only_who_paces_by_tokens(
    inside: Namespace, closely: bool
) -> None:
    async with listening(inside, closely=closely) as (first, reported):
        second = Wire(inside, first.tap)
        first.send(post())
        second.send(post())
        await first_event(reported, Arrived, times=2)
        second.answer(HEAD + event(0))  # the head rings, so the token is read
        await asyncio.sleep(_ROUND_SECONDS)
        assert any(isinstance(one, FirstToken) for one in reported) is closely
        told = [*reported, *first.tap.replica.beat()]
        assert sum(isinstance(one, FirstToken) for one in told) == 1
        second.close()


async def test_where_no_gate_is_shut_for_one_a_first_token_waits_though_watched_closely(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=True) as (wire, reported):
        replica = wire.tap.replica
        replica.watch = msgspec.structs.replace(replica.watch, firsts=False)
        replica.beat()
        await expect_first_token_with_the_heartbeat(wire, reported)


async def test_beside_several_streams_that_are_watched_closely_only_requests_wake_the_tap(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=True) as (first, reported):
        replica = first.tap.replica
        replica.watch = msgspec.structs.replace(replica.watch, firsts=False)
        others = [Wire(inside, first.tap) for _ in range(following._CROWD)]
        for number, wire in enumerate([first, *others]):
            wire.send(post())
            wire.answer(HEAD, event(0))
            await first_event(reported, Arrived, times=number + 1)
        replica.beat()
        read = replica.tracker.packets
        first.answer(END)
        others[0].answer(event(1), END)
        await asyncio.sleep(_ROUND_SECONDS)
        assert replica.tracker.packets == read, "their ends wake nobody"
        first.send(post())
        await first_event(reported, Arrived, times=len(others) + 2)
        assert sum(isinstance(one, Ended) for one in reported) == 2, "told with the next arrival"
        for wire in others[1:]:
            wire.answer(END)
        replica.beat()
        first.answer(HEAD, event(0), END)
        await first_event(reported, Ended, times=3)
        assert replica.tracker.in_flight == 0, "the end of the last one is told at once again"
        for wire in others:
            wire.close()


async def test_counts_are_taken_at_each_heartbeat_only_where_somebody_paces_by_tokens(
    inside: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_COUNT_NS", 10**18)
    async with listening(inside, closely=False) as (wire, _):
        replica = wire.tap.replica
        wire.send(post())
        wire.answer(HEAD, event(0))
        await asyncio.sleep(_ROUND_SECONDS)
        replica.beat()
        await asyncio.sleep(0.01)  # tokens are told apart from 5 ms on
        wire.answer(event(1))
        await asyncio.sleep(_ROUND_SECONDS)
        later = tokens_of(replica.beat())
        assert bool(later) is not replica.counting, "a reader has them anyway"
        replica.watch = msgspec.structs.replace(replica.watch, closely=True)
        later += tokens_of(replica.beat())
        assert later == [2]


async def test_where_nobody_has_to_be_stopped_all_waits_for_the_heartbeat(
    inside: Namespace,
) -> None:
    async with listening(inside, closely=False) as (wire, reported):
        replica = wire.tap.replica
        assert told_at_once(replica.beat())
        replica.watch = msgspec.structs.replace(replica.watch, at_once=False)
        assert not told_at_once(replica.beat()), "which the guard has to know"
        wire.send(post())
        wire.answer(HEAD, event(0), END)
        await asyncio.sleep(_ROUND_SECONDS)
        assert reported == []
        assert replica.tracker.in_flight == 0, "nothing was read either"
        told = replica.beat()
        assert [type(one) for one in told if isinstance(one, Arrived | FirstToken | Ended)] == [
            *(Arrived, FirstToken, Ended)
        ]
        wire.send(post())
        await asyncio.sleep(_ROUND_SECONDS)
        replica.watch = msgspec.structs.replace(replica.watch, at_once=True)
        assert any(isinstance(one, Arrived) for one in replica.beat()), "told when it is asked"
        wire.answer(HEAD, event(0), END)
        await first_event(reported, Ended)
        wire.send(post())
        await first_event(reported, Arrived)


async def test_tokens_of_others_are_not_looked_at_one_by_one_for_a_first_token(
    inside: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_REST_SECONDS", _LONG_SECONDS)
    async with listening(inside, closely=True) as (streaming, reported):
        waiting = Wire(inside, streaming.tap)
        for wire in (streaming, waiting):
            wire.send(post())
            wire.answer(HEAD)
        streaming.answer(event(0))
        await first_event(reported, FirstToken)
        await asyncio.sleep(0.01)
        streaming.answer(event(1))
        await asyncio.sleep(_ROUND_SECONDS)
        seen = streaming.tap.replica.tracker.packets
        for _ in range(TOKENS):
            streaming.answer(event(1))
            await asyncio.sleep(0)
        assert streaming.tap.replica.tracker.packets == seen, "it rests"
        streaming.tap.replica._end_rest()
        waiting.answer(event(0))
        await first_event(reported, FirstToken, times=2)
        waiting.close()


async def test_the_end_of_a_body_of_known_length_is_told_at_once(inside: Namespace) -> None:
    async with listening(inside, closely=False) as (wire, reported):
        wire.send(post())
        wire.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n")
        await first_event(reported, Arrived)
        wire.answer(b"x" * 10, b"y" * 10)
        await first_event(reported, Ended)


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
        wire.send(post())
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
        watch = TapWatch(PodUid("pod"), 0, 1, interfaces=("lo",), closely=closely)
        async with tap_process(short_dir, watch) as (listener, _):
            beats = [(await listener.beat(0)).time_ns for _ in range(25)]
        gaps = [after - before for before, after in itertools.pairwise(beats)]
        between[closely] = statistics.median(gaps)
    assert 1.4 < between[False] / between[True] < 3


@pytest.mark.parametrize("every", [PERIOD_NS, PERIOD_NS // 2])
def test_a_heartbeat_falls_just_before_a_period_and_neither_at_once_nor_late(every: int) -> None:
    for late in range(0, every, 1_000_000):
        now = 7 * PERIOD_NS + late
        wait = parser.before(every, now)
        lead = -(now + wait) % every
        assert 0 < lead < 10_000_000
        assert every // 4 < wait <= every // 4 * 5


async def test_a_token_wakes_nobody_but_with_a_heartbeat_or_with_news(short_dir: Path) -> None:
    """What the guard is told per second is bounded by heartbeats and requests, not by tokens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        watch = TapWatch(PodUid("pod"), 0, port, interfaces=("lo",), closely=True)
        async with tap_process(short_dir, watch) as (listener, _):
            with (
                closing(socket.create_connection(("127.0.0.1", port))) as client,
                closing(server.accept()[0]) as answering,
            ):
                reported = asyncio.create_task(_until_ended(listener))
                client.sendall(post())
                answering.sendall(HEAD)
                for number in range(_STREAMED):
                    answering.sendall(event(number))
                    await asyncio.sleep(0.005)
                answering.sendall(END)
                async with asyncio.timeout(_LONG_SECONDS):
                    frames_told = await reported
    beats = sum(any(isinstance(one, Health) for one in frame) for frame in frames_told)
    assert len(frames_told) - beats <= len((Arrived, FirstToken, Ended)) + 1, "a head in two pieces"
    assert len(tokens_of([e for frame in frames_told for e in frame])) >= beats // 2
    (ended,) = (one for one in frames_told[-1] if isinstance(one, Ended))
    assert ended.tokens == _STREAMED


async def _until_ended(listener: Listener) -> list[list[TapEvent]]:
    received: list[list[TapEvent]] = []
    while not received or not any(isinstance(one, Ended) for one in received[-1]):
        received.append(await frames.read(listener._reader, frames.events))
    return received
