"""What reads the bytes of serving pods, one function each: bytes in, nothing raised.

A target says what must hold for *every* input. ``run`` lets a coverage-guided fuzzer (libFuzzer, by
``atheris``) look for one that breaks it; ``test_corpus`` tries what was found before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator

import msgspec

from rose_agent.signals.messages import WireFigures, replies
from rose_agent.signals.snapshot import mapped
from rose_agent.signals.zmtp import Subscription
from rose_agent.tap import packets
from rose_core.telemetry import dialects
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.tracker import Tracker

Target = Callable[[bytes], None]
_PORT = 30000
# A request's bookkeeping in the tap: far below what an input of this size could ask for.
_MOST_EVENTS_A_BYTE = 2


def _is_bounded(figures: Figures) -> None:
    """It fits the guard's types, or is unknown."""
    assert WireFigures.of(figures) is not None


def sglang_metrics(data: bytes) -> None:
    """SGLang's ``/metrics``."""
    _is_bounded(dialects.sglang_metrics(data.decode("utf-8", "replace")))


def vllm_metrics(data: bytes) -> None:
    """VLLM's ``/metrics``."""
    _is_bounded(dialects.vllm_metrics(data.decode("utf-8", "replace")))


def sglang_loads(data: bytes) -> None:
    """SGLang's load page."""
    _is_bounded(dialects.sglang_loads(data))


def vllm_load(data: bytes) -> None:
    """VLLM's load page."""
    _is_bounded(dialects.vllm_load(data))


def sglang_snapshot(data: bytes) -> None:
    """SGLang's load snapshot in shared memory."""
    _is_bounded(dialects.sglang_snapshot(data))


def sglang_feed(data: bytes) -> None:
    """A message of SGLang's load feed."""
    _is_bounded(dialects.sglang_feed(data))


def maps(data: bytes) -> None:
    """A ``/proc/PID/maps`` text, whose paths the pod chose."""
    path = mapped(data.decode("utf-8", "replace"))
    assert path is None or "sglang_loads_" in path


def reader_reply(data: bytes) -> None:
    """What a reader says to the guard: refused, or within bounds."""
    try:
        replies.decode(data)
    except msgspec.MsgspecError:
        return


def zmtp(data: bytes) -> None:
    """A publisher's bytes: a message, or a refusal that says why."""

    async def talk() -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        subscription = Subscription(stream, _Nowhere())  # type: ignore[arg-type]  # nobody listens
        try:
            await subscription._shake_hands(b"load")
            while True:
                await subscription.receive()
        except (ValueError, asyncio.IncompleteReadError):
            return

    asyncio.run(talk())


class _Nowhere:
    """A writer without a peer."""

    def write(self, data: bytes) -> None:
        """Nobody reads it."""


def tap_packets(data: bytes) -> None:
    """Packets as the tap captures them: any bytes are segments of one replica, or passed over."""
    numbers = itertools.count(1)
    tracker = Tracker("replica", lambda: next(numbers))
    made = 0
    for time_ns, packet in enumerate(_pieces(data)):
        segment = packets.decode(packet, _PORT, time_ns * 1_000_000)
        if segment is not None:
            made += len(tracker.feed(segment))
    assert made <= _MOST_EVENTS_A_BYTE * len(data)


def tap_streams(data: bytes) -> None:
    """Both directions of one connection, byte for byte the pod's and its clients'."""
    numbers = itertools.count(1)
    tracker = Tracker("replica", lambda: next(numbers))
    sequence = {True: 1000, False: 5000}
    for time_ns, piece in enumerate(_pieces(data)):
        to_server, body = bool(piece[:1] and piece[0] & 1), piece[1:]
        header = _tcp(sequence[to_server], to_server=to_server) + body
        segment = packets.decode(header, _PORT, time_ns * 1_000_000)
        assert segment is not None
        tracker.feed(segment)
        sequence[to_server] = (sequence[to_server] + len(body)) % 2**32


def _tcp(sequence: int, *, to_server: bool) -> bytes:
    """IPv4 and TCP heads; a total of 0 lets what was captured count."""
    ours, theirs = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
    ends = theirs + ours if to_server else ours + theirs
    ports = (40000, _PORT) if to_server else (_PORT, 40000)
    ip = b"\x45\0\0\0" + bytes(5) + b"\x06" + bytes(2) + ends
    tcp = b"".join(port.to_bytes(2) for port in ports) + sequence.to_bytes(4) + bytes(4)
    return ip + tcp + b"\x50\x10" + bytes(6)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cut by a length of two bytes before each piece, as libFuzzer learns to write them."""
    while len(data) > 2:
        size = int.from_bytes(data[:2])
        yield data[2 : 2 + size]
        data = data[2 + size :]


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        sglang_metrics,
        vllm_metrics,
        sglang_loads,
        vllm_load,
        sglang_snapshot,
        sglang_feed,
        maps,
        reader_reply,
        zmtp,
        tap_packets,
        tap_streams,
    )
}
