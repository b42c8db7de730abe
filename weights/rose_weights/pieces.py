"""Blocks as the pieces that a fetch sends, and back.

A piece is about as large as gRPC carries best. Small blocks are joined, a large one is a piece of
its own; a receiver knows the sizes from the manifest and takes any cut. Bytes are copied only where
a block ends in another piece than it began in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

PIECE_BYTES = 1 << 20
"""Raw bytes per message, where blocks are smaller: the best of the sizes tried on loopback."""

AHEAD_BYTES = 4 << 20
"""Read together, while as much is on the wire."""

FEWEST, MOST = 8, 512
"""Blocks that are read together, at least and at most."""


def together(sent_bytes: int, sent_blocks: int) -> int:
    """How many blocks to read next, going by the size of those before."""
    if not sent_blocks:
        return FEWEST
    mean = max(sent_bytes // sent_blocks, 1)
    return min(max(AHEAD_BYTES // mean, FEWEST), MOST)


def pack(blocks: Iterable[bytes]) -> list[bytes]:
    """Blocks as pieces, in order; none is cut."""
    pieces: list[list[bytes]] = []
    size = PIECE_BYTES
    for block in blocks:
        if size + len(block) > PIECE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(block)
        size += len(block)
    return [part[0] if len(part) == 1 else b"".join(part) for part in pieces]


class Unpacker:
    """Pieces back to blocks.

    Args:
        sizes: of the blocks that will come, in order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = deque(sizes)
        self._begun = bytearray()

    @property
    def left(self) -> int:
        """Blocks that have not come whole."""
        return len(self._sizes)

    @property
    def begun_bytes(self) -> int:
        """Bytes of a block that has not come whole."""
        return len(self._begun)

    def feed(self, piece: bytes) -> list[memoryview]:
        """The blocks that are whole with this piece."""
        data = memoryview(piece)
        if self._begun:
            data = memoryview(bytes(self._begun) + piece)
        ready = []
        at = 0
        while self._sizes and len(data) - at >= self._sizes[0]:
            size = self._sizes.popleft()
            ready.append(data[at : at + size])
            at += size
        self._begun = bytearray(data[at:])
        return ready
