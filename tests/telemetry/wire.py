"""Builds byte streams of HTTP conversations as TCP segments, the way a capture would show them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from rose_core.identity import PodUid
from rose_core.telemetry.events import TapEvent
from rose_core.telemetry.segments import FIN, RST, SYN, Segment
from rose_core.telemetry.tracker import Tracker

CLIENT = ("0a000001", 40000)
MS = 1_000_000


@dataclass
class Conversation:
    """One connection; every call is one segment, one millisecond after the one before."""

    tracker: Tracker
    client: tuple[str, int] = CLIENT
    time_ns: int = 0
    sequence: dict[bool, int] = field(default_factory=lambda: {True: 1000, False: 5000})
    events: list[TapEvent] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def open(self) -> None:
        self._send(to_server=True, flags=SYN)
        self._send(to_server=False, flags=SYN)
        self.sequence = {side: number + 1 for side, number in self.sequence.items()}

    def client_sends(self, data: bytes, **more: int) -> list[TapEvent]:
        return self._send(to_server=True, data=data, **more)

    def server_sends(self, data: bytes, **more: int) -> list[TapEvent]:
        return self._send(to_server=False, data=data, **more)

    def unseen(self, data: bytes) -> None:
        """The server sent this, and the kernel filter left it out."""
        self.sequence[False] += len(data)
        self.time_ns += MS

    def finish(self, *, by_server: bool, reset: bool = False) -> list[TapEvent]:
        return self._send(to_server=not by_server, flags=RST if reset else FIN)

    def _send(
        self, *, to_server: bool, data: bytes = b"", flags: int = 0, again: int = 0, keep: int = -1
    ) -> list[TapEvent]:
        """``again`` bytes of the past are sent once more; only ``keep`` bytes are captured."""
        self.time_ns += MS
        start = (self.sequence[to_server] - again) % 2**32
        captured = data if keep < 0 else data[:keep]
        segment = Segment(self.time_ns, self.client, to_server, start, flags, captured, len(data))
        if not flags & SYN:
            self.sequence[to_server] = (start + len(data)) % 2**32
        self.segments.append(segment)
        new = self.tracker.feed(segment)
        self.events += new
        return new


def tracker() -> Tracker:
    numbers = itertools.count(1)
    return Tracker(PodUid("replica"), lambda: next(numbers))


def conversation(watching: Tracker | None = None, port: int = 40000) -> Conversation:
    made = Conversation(watching or tracker(), ("0a000001", port))
    made.open()
    return made


def post(body: bytes = b'{"text":"hello"}', path: str = "/generate") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(number: int) -> bytes:
    return chunk(b'data: {"n": %d}\n\n' % number)


END = b"0\r\n\r\n"
