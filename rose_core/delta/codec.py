"""Blocks: the changes of one tile as bytes, and back.

A block stands for itself: its header says how to read it, its SHA-256 is its name. Codecs, chosen
per tile by what is smallest:

| tag | codec | holds | needs the base |
|---|---|---|---|
| 1 | ``RAW`` | every element's bits | no |
| 2 | ``PLANES`` | the same, byte planes through zstd | no |
| 3 | ``STEPS`` | changed positions and ordered-integer steps (v1) | for the values only |
| 4 | ``RICE`` | the same, coded by the base's exponents (v2, ``rice``) | to be read at all |

A tile without a change has no block (*same*). ``docs/weight-format.md`` is the specification.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import zstandard

from rose_core.delta import rice
from rose_core.delta.bits import Bits, Indices, NumberFormat
from rose_core.delta.errors import BlockError
from rose_core.delta.kernels import Backend, kernels

# Gaps and steps hold hardly any repetition, so nearly all is won by the entropy coder: looking for
# long matches only, in a table that fits the first-level cache, is both smaller and faster than
# level 1. Any zstd reader takes the frames.
_ZSTD = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
)

# tag, width in bytes, reserved, elements of the tile, changes, lengths of the three streams packed
_HEADER = struct.Struct("<BBHIIIII")
HEADER_BYTES = _HEADER.size


class _Contexts(threading.local):
    """One zstd context per thread: making one costs as much as a small stream."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


class Codec(IntEnum):
    """How a block's bytes are to be read."""

    RAW = 1
    PLANES = 2
    STEPS = 3
    RICE = 4


_CODECS = frozenset(Codec)

SELF_CONTAINED = (Codec.RAW, Codec.PLANES, Codec.STEPS)
"""Every receiver reads these, and they merge; the rest is sent to receivers that ask for it."""


@dataclass(frozen=True)
class TileChanges:
    """What a block says about its tile. Exactly one of ``steps`` and ``values`` is given.

    Attributes:
        indices: positions inside the tile, ascending; None when every element is given.
        steps: ordered-integer steps, one per position.
        values: new bits of every element of the tile.
    """

    indices: Indices | None = None
    steps: Bits | None = None
    values: Bits | None = None

    @property
    def dense(self) -> bool:
        """Every element is given, so no base is needed."""
        return self.values is not None

    def __len__(self) -> int:
        """Number of elements given."""
        given = self.values if self.steps is None else self.steps
        return 0 if given is None else len(given)

    def resolve(self, old: Bits, kind: NumberFormat) -> Bits:
        """New bits of the elements given.

        Args:
            old: their bits in the base, in the same order; ignored when ``dense``.
            kind: the tensor's format.
        """
        if self.values is not None:
            return self.values
        if self.steps is None:
            return old
        return step(old, self.steps, kind)


def step(old: Bits, steps: Bits, kind: NumberFormat) -> Bits:
    """Move bits by ordered-integer steps, exactly, modulo the width."""
    if not kind.sign_magnitude:
        moved: Bits = old + steps
        return moved
    return kernels().move(old, steps)


def name_of(block: bytes | memoryview) -> bytes:
    """The content address of a block: its SHA-256."""
    return hashlib.sha256(block).digest()


class TileDiff(NamedTuple):
    """What a comparison of a tile's two states found.

    Attributes:
        indices: positions inside the tile that differ, ascending.
        before, after: their bits.
        changes: the same as steps.
    """

    indices: Indices
    before: Bits
    after: Bits
    changes: TileChanges


def compare(old: Bits, new: Bits, kind: NumberFormat, backend: Backend = "auto") -> TileDiff:
    """Compare a tile's two states; bits of the whole tile, contiguous."""
    return found(*kernels(backend).compare(old, new), kind, backend)


def found(
    indices: Indices, before: Bits, after: Bits, kind: NumberFormat, backend: Backend = "auto"
) -> TileDiff:
    """What a comparison finds whose positions are known already."""
    between = kernels(backend).steps_between if kind.sign_magnitude else _differences
    steps = between(before, after)
    return TileDiff(indices, before, after, TileChanges(indices, steps))


def _differences(old: Bits, new: Bits) -> Bits:
    moved: Bits = new - old
    return moved


def find_changes(
    old: Bits, new: Bits, kind: NumberFormat, backend: Backend = "auto"
) -> TileChanges:
    """The changed positions of a tile and their steps; bits of the whole tile, contiguous."""
    return compare(old, new, kind, backend).changes


def encode_tile(
    old: Bits | None, new: Bits, kind: NumberFormat, backend: Backend = "auto"
) -> tuple[bytes, int]:
    """The smallest block that turns ``old`` (None = nothing known) into ``new``.

    Both are the bits of the whole tile, row-major and contiguous.

    Returns:
        The block and the number of changed elements; an empty block when nothing changed.
    """
    if old is None:
        return encode_dense(new), len(new)
    changes = find_changes(old, new, kind, backend)
    return encode_found(changes, new, backend), len(changes)


def encode_found(changes: TileChanges, new: Bits, backend: Backend = "auto") -> bytes:
    """The smallest block for changes that ``find_changes`` found; empty when there are none.

    ``new`` are the bits of the whole tile, for the case that a dense block is smaller.
    """
    if not len(changes):
        return b""
    if hopeless(len(changes), new.nbytes):
        return encode_dense(new)
    return or_dense(encode_changes(changes, len(new), backend), new)


def hopeless(changes: int, tile_bytes: int) -> bool:
    """Beyond this density not even the best sparse block can win, so do not try."""
    return changes * 2 > tile_bytes


def or_dense(block: bytes, new: Bits) -> bytes:
    """A sparse block, or a dense one where that is smaller."""
    if len(block) * 3 > new.nbytes:
        block = min(block, encode_dense(new), key=len)
    return block


def may_be_dense(plain_bytes: int, tile_bytes: int) -> bool:
    """Whether a dense block may be smaller, judged by a sparse one's streams before zstd.

    zstd makes nothing larger than by 1/256 and 64 bytes a stream.
    """
    return (HEADER_BYTES + plain_bytes + plain_bytes // 256 + 256) * 3 > tile_bytes


def encode_changes(changes: TileChanges, elements: int, backend: Backend = "auto") -> bytes:
    """Positions and steps as a ``STEPS`` block, or dense values as a dense one."""
    if changes.values is not None:
        return encode_dense(changes.values)
    if changes.indices is None or changes.steps is None:
        message = "changes without positions cannot be encoded"
        raise BlockError(message)
    return encode_streams(kernels(backend).pack(changes.indices, changes.steps), elements)


def encode_streams(streams: tuple[Bits, Bits, Bits], elements: int) -> bytes:
    """Gap bytes, code bytes and escaped steps as a ``STEPS`` block."""
    packed = [_pack(np.ascontiguousarray(stream)) for stream in streams]
    _, codes, escapes = streams
    return _join(Codec.STEPS, escapes.dtype.itemsize, elements, len(codes), packed)


def read_streams(block: bytes, kind: NumberFormat, elements: int) -> tuple[Bits, Bits, Bits] | None:
    """The streams of a ``STEPS`` block, None for a block of another codec.

    Raises:
        BlockError: the bytes are no block of such a tile.
    """
    codec, changes, parts = _split(block, kind.width, elements)
    return _streams(parts, kind, changes, elements) if codec == Codec.STEPS else None


def encode_on_base(
    old: Bits, changes: TileChanges, kind: NumberFormat, backend: Backend = "auto"
) -> bytes:
    """Positions and steps as a ``RICE`` block, for a receiver that holds ``old`` (the whole tile).

    Raises:
        BlockError: dense changes, or a format too wide for it.
    """
    if changes.indices is None or changes.steps is None:
        message = "changes without positions cannot be encoded"
        raise BlockError(message)
    found = rice.encode(old, changes.indices, changes.steps, kind, backend)
    return join_classes(found, kind, len(old), len(changes))


def join_classes(
    found: tuple[bytes, bytes], kind: NumberFormat, elements: int, changes: int
) -> bytes:
    """A class table and its bit stream (``rice``) as a ``RICE`` block."""
    return _join(Codec.RICE, kind.width, elements, changes, [*found, b""])


def encode_dense(values: Bits) -> bytes:
    """Every element, through zstd by byte planes when that is smaller."""
    width = values.dtype.itemsize
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, width).T)
    packed = _pack(planes)
    if len(packed) < values.nbytes:
        return _join(Codec.PLANES, width, len(values), len(values), [packed, b"", b""])
    return _join(Codec.RAW, width, len(values), len(values), [values.tobytes(), b"", b""])


def decode_block(
    block: bytes,
    kind: NumberFormat,
    elements: int,
    backend: Backend = "auto",
    *,
    base: Bits | None = None,
) -> TileChanges:
    """Read a block of a tile of ``elements``; its hash was checked by ``check_block``.

    ``base`` are the tile's bits in the base; only ``RICE`` blocks need them.

    Raises:
        BlockError: the bytes are no such block.
    """
    codec, changes, parts = _split(block, kind.width, elements)
    if codec == Codec.RAW:
        return TileChanges(values=_typed(parts[0], kind, elements))
    if codec == Codec.PLANES:
        planes = _unpack(parts[0], elements * kind.width)
        if planes.size != elements * kind.width:
            message = f"{planes.size} bytes of planes for {elements} elements of {kind.width}"
            raise BlockError(message)
        values = np.ascontiguousarray(planes.reshape(kind.width, elements).T)
        return TileChanges(values=values.reshape(-1).view(kind.unsigned))
    if codec == Codec.RICE:
        if base is None:
            message = "a block coded on its base cannot be read without it"
            raise BlockError(message)
        return TileChanges(*rice.decode(base, parts[0], parts[1], changes, kind, backend))
    return _steps(_streams(parts, kind, changes, elements), changes, elements, backend)


def check_block(block: bytes | memoryview, name: bytes) -> None:
    """Compare a block with its content address.

    Raises:
        BlockError: they differ.
    """
    found = name_of(block)
    if found != name:
        message = f"block {name.hex()[:16]} has content {found.hex()[:16]}; fetch it again"
        raise BlockError(message)


def _streams(
    parts: list[bytes], kind: NumberFormat, changes: int, elements: int
) -> tuple[Bits, Bits, Bits]:
    gaps = _unpack(parts[0], changes + elements // 255 + 1)
    codes = _unpack(parts[1], changes)
    escapes = _unpack(parts[2], changes * kind.width)
    if len(codes) != changes or len(escapes) % kind.width:
        message = f"a block of {changes} changes holds {len(codes)} steps"
        raise BlockError(message)
    return gaps, codes, escapes.view(kind.unsigned)


def _steps(
    streams: tuple[Bits, Bits, Bits], changes: int, elements: int, backend: Backend
) -> TileChanges:
    found = kernels(backend).unpack(*streams)
    if found is None or (changes and int(found[0][-1]) >= elements):
        message = f"the streams of a block do not describe {changes} of {elements} elements"
        raise BlockError(message)
    return TileChanges(*found)


def _pack(stream: Bits) -> bytes:
    if not stream.nbytes:
        return b""
    return _contexts.compressor.compress(stream.reshape(-1).view(np.uint8).data)


def _unpack(data: bytes, most: int) -> Bits:
    """A stream's bytes; refuses to make more than ``most``, whatever the frame claims."""
    if not data:
        return np.empty(0, np.uint8)
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= most:
            message = f"a stream of {size} bytes where at most {most} can be"
            raise BlockError(message)
        plain = _contexts.decompressor.decompress(data, max_output_size=most)
    except zstandard.ZstdError as error:
        message = f"a stream that zstd cannot read: {error}"
        raise BlockError(message) from error
    return np.frombuffer(plain, np.uint8)


def _join(codec: Codec, width: int, elements: int, changes: int, parts: list[bytes]) -> bytes:
    header = _HEADER.pack(codec, width, 0, elements, changes, *map(len, parts))
    return b"".join((header, *parts))


def _split(block: bytes, width: int, elements: int) -> tuple[Codec, int, list[bytes]]:
    if len(block) < HEADER_BYTES:
        message = f"a block of {len(block)} bytes is shorter than its header"
        raise BlockError(message)
    tag, found_width, _, found_elements, changes, *lengths = _HEADER.unpack_from(block)
    if tag not in _CODECS:
        message = f"codec {tag} is unknown; known: {', '.join(map(str, map(int, Codec)))}"
        raise BlockError(message)
    if (found_width, found_elements) != (width, elements) or changes > elements:
        message = (
            f"a block for {found_elements} elements of {found_width} bytes with {changes} "
            f"changes, where the tile has {elements} of {width}"
        )
        raise BlockError(message)
    if sum(lengths) != len(block) - HEADER_BYTES:
        message = f"a block of {len(block)} bytes whose header promises {sum(lengths)}"
        raise BlockError(message)
    ends = itertools.accumulate((HEADER_BYTES, *lengths))
    return Codec(tag), changes, [block[a:b] for a, b in itertools.pairwise(ends)]


def _typed(data: bytes, kind: NumberFormat, elements: int) -> Bits:
    if len(data) != elements * kind.width:
        message = f"{len(data)} raw bytes for {elements} elements of {kind.width}"
        raise BlockError(message)
    return np.frombuffer(data, kind.unsigned)
