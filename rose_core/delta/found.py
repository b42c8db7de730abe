"""Changes of a tile that were found where the tensor lies, on their way to being a block.

An accelerator compares and codes (``rose_engines.ondevice.device_loops``); what leaves it is one
``FoundTile`` per changed tile: streams of about two bytes per change, and what they add to the
digest. The rest, zstd and the bit stream of exponent classes, is left to the host. The block is the
one that ``codec.encode_tile`` makes of the whole tile. Next step: ``Builder.add_found``.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.delta import rice
from rose_core.delta.bits import Bits, NumberFormat
from rose_core.delta.codec import (
    encode_dense,
    encode_streams,
    hopeless,
    join_classes,
    or_dense,
)
from rose_core.delta.digest import Digest
from rose_core.delta.errors import BlockError


@dataclass(frozen=True)
class FoundTile:
    """One changed tile.

    Attributes:
        tile: number in its tensor.
        kind: the tensor's format.
        elements: of the tile.
        changes: elements that changed.
        moved: what that adds to the digest.
        streams: gap bytes, code bytes, escaped steps.
        bits: all new bits, where a dense block may be smaller.
        ranked: classes of the changes and their steps, where a block on the base is wanted.
    """

    tile: int
    kind: NumberFormat
    elements: int
    changes: int
    moved: Digest
    streams: tuple[Bits, Bits, Bits]
    bits: Bits | None = None
    ranked: tuple[rice.Ranked, Bits] | None = None

    def block(self) -> bytes:
        """The smallest block that every receiver reads."""
        if self.bits is None:
            return encode_streams(self.streams, self.elements)
        if hopeless(self.changes, self.bits.nbytes):
            return encode_dense(self.bits)
        return or_dense(encode_streams(self.streams, self.elements), self.bits)

    def block_on_base(self) -> bytes:
        """The same, coded on the tile's base.

        Raises:
            BlockError: nobody asked for the classes when the tile was compared.
        """
        if self.ranked is None:
            message = "a tile whose classes were not found cannot be coded on its base"
            raise BlockError(message)
        coded = rice.encode_ranked(*self.ranked, self.kind)
        return join_classes(coded, self.kind, self.elements, self.changes)
