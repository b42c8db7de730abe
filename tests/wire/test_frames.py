import asyncio

import pytest

from rose_wire import frames
from rose_wire.frames import Splitter

BODIES = [b"", b"one", bytes(300)]
SENT = b"".join(frames.pack(body) for body in BODIES)


@pytest.mark.parametrize("size", [1, 5, len(SENT)])
def test_frames_are_found_however_their_bytes_come(size: int) -> None:
    splitter = Splitter(1000, "a test")
    pieces = [SENT[start : start + size] for start in range(0, len(SENT), size)]
    assert [body for piece in pieces for body in splitter.feed(piece)] == BODIES


def test_what_came_before_a_frame_that_is_too_long_is_handed_on_first() -> None:
    found = Splitter(299, "a test").feed(SENT)
    assert [next(found), next(found)] == BODIES[:2]
    with pytest.raises(ValueError, match="300 bytes on a test; at most 299"):
        next(found)


async def test_a_reader_takes_one_frame_at_a_time_and_none_that_is_too_long() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(SENT)
    assert [await frames.read(reader, 299, "a test") for _ in range(2)] == BODIES[:2]
    with pytest.raises(ValueError, match="at most 299"):
        await frames.read(reader, 299, "a test")
