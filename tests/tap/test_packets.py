"""Packets to segments, and the kernel filters as programs."""

from __future__ import annotations

import asyncio
import struct

import pytest

from rose_agent.os import bpf
from rose_agent.tap import frames
from rose_agent.tap.frames import TapWatch, Unwatch
from rose_agent.tap.packets import decode
from rose_core.identity import PodUid
from rose_core.telemetry.events import Health

POD = PodUid("r")

PORT = 30000


def tcp(payload: bytes, *, source: int, target: int, sequence: int = 7, flags: int = 0x18) -> bytes:
    return struct.pack("!HHIIBBHHH", source, target, sequence, 0, 0x50, flags, 0, 0, 0) + payload


def ipv4(segment: bytes, *, total: int | None = None, protocol: int = 6) -> bytes:
    length = len(segment) + 20 if total is None else total
    head = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, length, 0, 0, 64, protocol, 0, b"\1" * 4, b"\2" * 4
    )
    return head + segment


def ipv6(segment: bytes) -> bytes:
    return (
        struct.pack("!IHBB16s16s", 6 << 28, len(segment), 6, 64, b"\1" * 16, b"\2" * 16) + segment
    )


@pytest.mark.parametrize("wrap", [ipv4, ipv6])
@pytest.mark.parametrize("to_server", [True, False])
def test_both_families_and_directions(wrap: object, to_server: bool) -> None:
    source, target = (40000, PORT) if to_server else (PORT, 40000)
    assert callable(wrap)
    segment = decode(wrap(tcp(b"hello", source=source, target=target)), PORT, 123)
    assert segment is not None
    assert (segment.time_ns, segment.to_server, segment.sequence) == (123, to_server, 7)
    assert (segment.payload, segment.size, segment.client[1]) == (b"hello", 5, 40000)


def test_padding_is_no_payload() -> None:
    packet = ipv4(tcp(b"", source=40000, target=PORT)) + bytes(6)
    segment = decode(packet, PORT, 0)
    assert segment is not None
    assert (segment.payload, segment.size) == (b"", 0)


def test_a_cut_capture_keeps_the_true_length() -> None:
    packet = ipv4(tcp(b"x" * 1000, source=40000, target=PORT))[:140]
    segment = decode(packet, PORT, 0)
    assert segment is not None
    assert (len(segment.payload), segment.size) == (100, 1000)


def test_a_missing_length_is_the_captured_one() -> None:
    packet = ipv4(tcp(b"x" * 50, source=40000, target=PORT), total=0)
    segment = decode(packet, PORT, 0)
    assert segment is not None
    assert segment.size == 50


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        bytes(60),
        ipv4(tcp(b"x", source=1, target=2)),
        ipv4(tcp(b"x", source=1, target=PORT), protocol=17),
        b"\x50" + bytes(80),
    ],
)
def test_anything_else_is_passed_over(packet: bytes) -> None:
    assert decode(packet, PORT, 0) is None


@pytest.mark.parametrize("rate", [0, 1, 8])
def test_filters_jump_forward_inside_themselves_and_end(rate: int) -> None:
    code = bpf.program(PORT, rate=rate)
    lines = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    for index, (operation, yes, no, _) in enumerate(lines):
        if operation & 0x07 == 0x05:
            assert index + 1 + max(yes, no) < len(lines)
    assert [line[0] for line in lines[-3:]][-1] == 0x06
    assert len(lines) < 100


async def test_frames_come_back_as_they_were() -> None:
    reader = asyncio.StreamReader()
    health = Health(POD, 1, "", 0, opaque=False, in_flight=2, counts={"/generate": 3}, packets=4)
    reader.feed_data(frames.pack([TapWatch(POD, 1, 2, interfaces=("lo",)), Unwatch(PodUid("q"))]))
    reader.feed_data(frames.pack([health]))
    assert await frames.read(reader, frames.commands) == [
        TapWatch(POD, 1, 2, interfaces=("lo",)),
        Unwatch(PodUid("q")),
    ]
    assert await frames.read(reader, frames.events) == [health]


async def test_a_frame_without_end_is_refused() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\xff\xff\xff\x7f")
    with pytest.raises(ValueError, match="at most"):
        await frames.read(reader, frames.events)
