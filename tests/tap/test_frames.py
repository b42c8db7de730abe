"""What goes over ``tap.sock``: frames in any pieces, and tokens that may wait."""

from __future__ import annotations

import asyncio

import pytest

from rose_agent.tap import frames
from rose_agent.tap.frames import Splitter, TapWatch
from rose_agent.tap.replica import TappedReplica
from rose_core.identity import PodUid
from rose_core.telemetry.events import (
    Arrived,
    Counted,
    Ended,
    EndKind,
    FirstToken,
    Progress,
    TapEvent,
)

POD = PodUid("pod")

EVENTS: list[list[TapEvent]] = [
    [Arrived(POD, 1, 5, "/generate")],
    [FirstToken(POD, 1, 9), Progress(POD, 1, 12, 3)],
    [Ended(POD, 1, 20, 7, 200, EndKind.COMPLETE)],
]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_are_found_however_their_bytes_come(size: int) -> None:
    splitter = Splitter(frames.events)
    sent = b"".join(frames.pack(events) for events in EVENTS)
    found = [
        frame
        for start in range(0, len(sent), size)
        for frame in splitter.feed(sent[start : start + size])
    ]
    assert found == EVENTS


def test_a_frame_longer_than_any_of_ours_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="at most"):
        Splitter(frames.events).feed(b"\xff\xff\xff\x7f")


def test_bytes_that_are_no_records_are_no_frame() -> None:
    """A pod's own tap is ended for them, and the guard never has to read them."""
    foreign = frames.pack([["c", POD, b"x" * 24]])
    with pytest.raises(ValueError, match="no records"):
        Splitter(frames.events).feed(foreign)
    assert Splitter(frames.events).feed(frames.pack([["c", POD, b""]])) == [[Counted(POD, b"")]]


def test_the_same_sockets_serve_a_closer_look() -> None:
    near, far = TapWatch(POD, 1, 80), TapWatch(POD, 1, 80, closely=False, at_once=False)
    assert near.same_sockets(far)
    assert not near.same_sockets(TapWatch(POD, 2, 80))


def followed(*, closely: bool) -> tuple[TappedReplica, list[list[TapEvent]]]:
    """A replica without sockets, and what it tells."""
    received: list[list[TapEvent]] = []
    made = TappedReplica(TapWatch(POD, 0, 80, closely=closely), [], frozenset(), lambda: 1, 400.0)
    made.start(received.append)
    return made, received


@pytest.mark.looptime
@pytest.mark.parametrize("closely", [True, False])
async def test_tokens_wait_for_the_heartbeat_and_only_the_last_is_told(closely: bool) -> None:
    made, reported = followed(closely=closely)
    for moment in range(4):
        made._pass_on([Progress(POD, 1, moment, moment)])
        made._pass_on([Progress(POD, 2, moment, moment)])
        await asyncio.sleep(0.008)
    await asyncio.sleep(1)
    assert reported == []
    assert made.beat()[:-1] == [Progress(POD, 1, 3, 3), Progress(POD, 2, 3, 3)]
    made.close()


@pytest.mark.looptime
async def test_nothing_else_waits_and_it_takes_the_tokens_along() -> None:
    made, reported = followed(closely=True)
    made._pass_on([Progress(POD, 1, 3, 3)])
    made._pass_on([EVENTS[2][0]])
    assert reported == [[Progress(POD, 1, 3, 3), EVENTS[2][0]]]
    await asyncio.sleep(1)
    assert len(reported) == 1, "told once"
    made.close()
