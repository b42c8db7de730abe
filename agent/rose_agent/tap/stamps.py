"""The kernel's time of a packet, on the clock that everything else uses.

The kernel stamps packets by the wall clock; events carry CLOCK_MONOTONIC. Next step: ``replica``
asks for the offset once per batch of packets.
"""

from __future__ import annotations

import socket
import struct
import time

from rose_agent.tap import sockets

_STAMP = struct.Struct("qq")
_BRACKETS, _TIGHT_NS = 5, 5_000


def clock_offset() -> int:
    """Nanoseconds from the monotonic to the kernel's packet clock.

    A thread that is descheduled between the two readings is wrong by that long, and events would
    then change their order: so the tightest of a few brackets counts.
    """
    best, offset = 1 << 62, 0
    for _ in range(_BRACKETS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < best:
            best, offset = after - before, wall - (before + after) // 2
        if best < _TIGHT_NS:
            break
    return offset


def stamp(ancillary: list[tuple[int, int, bytes]], offset_ns: int) -> int:
    """Kernel's time of the packet on the monotonic clock; now when it makes no sense."""
    now = time.monotonic_ns()
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == sockets.SO_TIMESTAMPNS:
            seconds, nanoseconds = _STAMP.unpack_from(data)
            told_ns = int(seconds) * 1_000_000_000 + int(nanoseconds) - offset_ns
            # A clock that was set between stamp and reading shows as a jump.
            return told_ns if now - 1_000_000_000 < told_ns <= now else now
    return now
