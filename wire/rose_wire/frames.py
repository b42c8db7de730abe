"""Frames on a stream socket of the node: four bytes of length, little endian, then that many bytes.

What a frame holds is for those who speak over the socket: calls (``local``), the tap's events
(``rose_agent.tap.frames``). The engine's control socket packs its own
(``rose_engines.weights.calls``), because an engine loads nothing of ``rose_wire``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes that only pack need none of it
    import asyncio

_LENGTH = struct.Struct("<I")


def pack(body: bytes) -> bytes:
    """One frame."""
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Cuts frames out of bytes as they come.

    Args:
        longest: most bytes that a frame may hold; a longer one is refused before it is read.
        where: which socket it is, for the error.
    """

    def __init__(self, longest: int, where: str) -> None:
        self._longest, self._where = longest, where
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes; what the frames hold that are complete now, in order.

        Raises:
            ValueError: a frame is longer than any of ours.
        """
        self._bytes += data
        at = 0
        try:
            while len(self._bytes) - at >= _LENGTH.size:
                start = at + _LENGTH.size
                (length,) = _LENGTH.unpack_from(self._bytes, at)
                _check(length, self._longest, self._where)
                if len(self._bytes) < start + length:
                    break
                at = start + length
                yield bytes(self._bytes[start:at])
        finally:
            del self._bytes[:at]


async def read(reader: asyncio.StreamReader, longest: int, where: str) -> bytes:
    """What the next frame holds.

    Raises:
        asyncio.IncompleteReadError: the peer has gone.
        ValueError: the frame is longer than any of ours.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    _check(length, longest, where)
    return await reader.readexactly(length)


def _check(length: int, longest: int, where: str) -> None:
    if length > longest:
        raise ValueError(f"frame of {length} bytes on {where}; at most {longest}")
