"""TCP segments of one connection, put into the order of their bytes.

Retransmissions are trimmed, missing bytes become holes (lost packets, or segments that the kernel
filter left out). Next step: ``tracker`` hands the pieces to the conversation of the connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FIN, SYN, RST = 0x01, 0x02, 0x04
Client = tuple[str, int]
"""Address (hex digits) and port of a client: the name of a connection to one serving port."""


class Segment(NamedTuple):
    """One TCP segment; ``payload`` may be cut by the capture, ``size`` is its true length."""

    time_ns: int
    client: Client
    to_server: bool
    sequence: int
    flags: int
    payload: bytes
    size: int


class SegmentPiece(NamedTuple):
    """What one segment adds to its stream: ``hole`` unseen bytes, data, ``cut`` unseen bytes."""

    hole: int
    data: bytes
    cut: int


NOTHING = SegmentPiece(0, b"", 0)


@dataclass(slots=True)
class StreamPosition:
    """Position in one direction of a connection; None before the first segment."""

    next: int | None = None

    def advance(self, segment: Segment) -> SegmentPiece:
        """Place the segment; ``NOTHING`` when all of it has been seen before."""
        if self.next is None:
            self.next = segment.sequence
        ahead = (segment.sequence - self.next) & 0xFFFFFFFF
        after = (segment.sequence + segment.size) & 0xFFFFFFFF
        if ahead >= 0x80000000:  # starts before what we have: a retransmission
            old = 0x100000000 - ahead
            if old >= segment.size:
                return NOTHING
            self.next = after
            cut = segment.size - max(old, len(segment.payload))
            return SegmentPiece(0, segment.payload[old:], cut)
        self.next = after
        return SegmentPiece(ahead, segment.payload, segment.size - len(segment.payload))
