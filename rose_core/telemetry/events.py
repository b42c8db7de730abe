"""What the tap tells the guard about one replica, as messages of the node's ``tap.sock``.

Times are CLOCK_MONOTONIC nanoseconds of the node; request numbers are unique per tap process.
Next step: ``tracker`` makes them, ``book`` applies them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class How(StrEnum):
    """How a request ended."""

    COMPLETE = "Complete"
    CLOSED = "Closed"
    RESET = "Reset"
    REPLACED = "Replaced"
    EXPIRED = "Expired"


class Arrived(msgspec.Struct, frozen=True, tag="a", array_like=True):
    """First segment of a request; ``path`` is empty while the request line is incomplete."""

    replica: str
    request: int
    time_ns: int
    path: str


class Dismissed(msgspec.Struct, frozen=True, tag="x", array_like=True):
    """The request turned out not to generate anything (probe, scrape)."""

    replica: str
    request: int


class Sized(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """The request's head is known: its body has ``size`` bytes (-1: chunked, unknown)."""

    replica: str
    request: int
    size: int


class FirstToken(msgspec.Struct, frozen=True, tag="f", array_like=True):
    """First event of a streamed response."""

    replica: str
    request: int
    time_ns: int


class Progress(msgspec.Struct, frozen=True, tag="p", array_like=True):
    """About ``tokens`` events have passed (estimated from bytes where segments are sampled)."""

    replica: str
    request: int
    time_ns: int
    tokens: int


class Ended(msgspec.Struct, frozen=True, tag="e", array_like=True):
    """The response's true end."""

    replica: str
    request: int
    time_ns: int
    tokens: int
    status: int
    how: How


class Health(msgspec.Struct, frozen=True, tag="h", array_like=True):
    """The tap's heartbeat for one replica.

    Attributes:
        problem: why the tap cannot be trusted now, or empty.
        lost_ns: last time packets were lost (kernel drop counter moved), 0 = never.
        opaque: connections whose contents cannot be read (TLS, HTTP/2) are open.
        in_flight: requests under way, to reconcile with what the guard counted.
        counts: requests seen since the tap began, by path.
        packets: segments handled since the tap began.
    """

    replica: str
    time_ns: int
    problem: str
    lost_ns: int
    opaque: bool
    in_flight: int
    counts: dict[str, int]
    packets: int


TapEvent = Arrived | Dismissed | Sized | FirstToken | Progress | Ended | Health
