"""What the tap tells the guard about one replica, as messages of the node's ``tap.sock``.

Times are CLOCK_MONOTONIC nanoseconds of the node; request numbers are unique per tap process.
Whoever paces by tokens does so in periods of that clock: the tap tells tokens just before each.
Next step: ``tracker`` makes them, ``book`` applies them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from rose_core.identity import PodUid

PERIOD_NS = 100_000_000
"""Of the duty cycle; a period begins where the clock is a multiple of it, for guard and tap."""


class EndKind(StrEnum):
    """How a request ended."""

    COMPLETE = "Complete"
    CLOSED = "Closed"
    RESET = "Reset"
    REPLACED = "Replaced"
    EXPIRED = "Expired"


class Arrived(msgspec.Struct, frozen=True, tag="a", array_like=True):
    """First segment of a request.

    Attributes:
        path: empty while the request line is incomplete, or cannot be read.
        opaque: neither tokens nor end of this request will show (TLS).
    """

    replica: PodUid
    request: int
    time_ns: int
    path: str
    opaque: bool = False


class Dismissed(msgspec.Struct, frozen=True, tag="x", array_like=True):
    """The request turned out not to generate anything (probe, scrape)."""

    replica: PodUid
    request: int


class Sized(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """The request's head is known: its body has ``size`` bytes (-1: chunked, unknown)."""

    replica: PodUid
    request: int
    size: int
    path: str = ""


class FirstToken(msgspec.Struct, frozen=True, tag="f", array_like=True):
    """First event of a streamed response."""

    replica: PodUid
    request: int
    time_ns: int


class Progress(msgspec.Struct, frozen=True, tag="p", array_like=True):
    """The request is alive; about ``tokens`` events have passed (estimated where sampled)."""

    replica: PodUid
    request: int
    time_ns: int
    tokens: int


class Counted(msgspec.Struct, frozen=True, tag="c", array_like=True):
    """What the kernel has counted of a replica's streams, as it lies there: ``progress`` reads it.

    One event for all streams, and neither end looks at each: at a heartbeat there may be hundreds.

    Attributes:
        records: one ``RECORD`` for each stream.
    """

    replica: PodUid
    records: bytes

    def __post_init__(self) -> None:
        """Refuse what are no records.

        Raises:
            ValueError: as for any other bytes that are no message, while they are decoded.
        """
        if len(self.records) % RECORD.size:
            raise ValueError(f"{len(self.records)} bytes are no records of {RECORD.size} each")


RECORD = struct.Struct("=QQIIQQ")
"""A stream in the kernel's map, as ``tokens.bpf.c`` has it: its position (32 bits), a mark (1) and
the tokens since it was entrusted (31), when the newest of these passed, its bytes and its number of
tokens; then what the program leaves alone: the request's number, and its tokens until then."""
RECORD_TOKENS = 0x7FFFFFFF


def progress(counted: Counted) -> Iterator[tuple[int, int, int]]:
    """Request, tokens so far, and when the newest passed, of each stream that has new ones."""
    for word, last_ns, _, _, request, before in RECORD.iter_unpack(counted.records):
        if last_ns:
            yield request, before + (word & RECORD_TOKENS), last_ns


class Ended(msgspec.Struct, frozen=True, tag="e", array_like=True):
    """The response's true end."""

    replica: PodUid
    request: int
    time_ns: int
    tokens: int
    status: int
    how: EndKind


class Health(msgspec.Struct, frozen=True, tag="h", array_like=True):
    """The tap's heartbeat for one replica.

    Attributes:
        problem: why the tap cannot be trusted now, or empty.
        lost_ns: last time packets were lost (kernel drop counter moved), 0 = never.
        opaque: connections whose contents cannot be read (TLS) are open.
        in_flight: requests under way, to reconcile with what the guard counted.
        counts: requests seen since the tap began, by path.
        packets: segments handled since the tap began.
        seen: generating requests whose head was read since the tap began.
        finished: those of them that have ended.
        unsure: those that ended so that the engine may not have counted them.
        at_once: arrivals and last ends are told as they happen; else with the heartbeats alone.
    """

    replica: PodUid
    time_ns: int
    problem: str
    lost_ns: int
    opaque: bool
    in_flight: int
    counts: dict[str, int]
    packets: int
    seen: int = 0
    finished: int = 0
    unsure: int = 0
    at_once: bool = True


TapEvent = Arrived | Dismissed | Sized | FirstToken | Progress | Counted | Ended | Health
