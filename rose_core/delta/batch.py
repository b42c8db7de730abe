"""Several ``STEPS`` blocks of one tensor decoded at once.

A block of a one per cent change holds a few thousand positions: they decode in microseconds, and
the calls around them take longer. A process that decodes beside other threads of Python (an engine
that serves meanwhile) holds the interpreter for every such call. Here the streams of many blocks
are laid end to end and decoded by one call of every kernel, which runs without the interpreter.

Next step: ``rose_engines.weights.staging`` checks the result against the live weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rose_core.delta.bits import Bits, Indices, NumberFormat
from rose_core.delta.codec import decode_block, read_streams
from rose_core.delta.errors import BlockError
from rose_core.delta.kernels import Backend, kernels
from rose_core.delta.loops import ESCAPE
from rose_core.delta.tiles import TileBox, Tiling

_Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TileBatch:
    """The changes of several tiles of one tensor, tile after tile.

    Attributes:
        positions: inside the *tensor*, ascending within each tile.
        steps: ordered-integer steps, one per position.
        ends: for every block, where its changes end.
    """

    positions: Indices
    steps: Bits
    ends: tuple[int, ...]


def decode_batch(
    blocks: Sequence[bytes],
    tiles: Sequence[int],
    cut: Tiling,
    kind: NumberFormat,
    backend: Backend = "auto",
) -> TileBatch:
    """Decode ``STEPS`` blocks; the bytes were checked by ``check_block``.

    Args:
        blocks: at least one.
        tiles: which tile of the tensor each block changes.
        cut: the tensor's tiling.
        kind: the tensor's element format.
        backend: of the inner loops.

    Raises:
        BlockError: one of them is no such block of such a tile.
    """
    boxes = [cut.box(tile) for tile in tiles]
    streams = [
        _streams(block, kind, box.elements) for block, box in zip(blocks, boxes, strict=True)
    ]
    gaps, codes, escapes = (np.concatenate(parts) for parts in zip(*streams, strict=True))
    counts = np.array([len(one[1]) for one in streams], np.int64)
    decoded = kernels(backend).unpack(gaps, codes, escapes)
    if decoded is not None and _belong_together(streams, gaps, codes):
        along, steps = decoded
        ends = np.cumsum(counts)
        local = along - np.repeat(_starts(along, ends), counts)
        if all(local[end - 1] < box.elements for end, box in zip(ends, boxes, strict=True)):
            positions = _in_tensor(local, boxes, counts, cut)
            return TileBatch(positions, steps, tuple(ends.tolist()))
    return _one_by_one(blocks, tiles, cut, kind, backend)


def _streams(block: bytes, kind: NumberFormat, elements: int) -> tuple[Bits, Bits, Bits]:
    found = read_streams(block, kind, elements)
    if found is None:
        message = "a block of another codec among those that are decoded together"
        raise BlockError(message)
    return found


def _belong_together(streams: Sequence[tuple[Bits, Bits, Bits]], gaps: Bits, codes: Bits) -> bool:
    """Every block has as many gaps and escapes as it has codes and escape codes, and some.

    ``gaps`` and ``codes`` are those of all blocks, end to end.
    """
    counts = [len(one) for _, one, _ in streams]
    if not all(counts):
        return False
    whole = _per_block(gaps != ESCAPE, [len(one) for one, _, _ in streams])
    escaped = _per_block(codes == ESCAPE, counts)
    return whole == counts and escaped == [len(one) for _, _, one in streams]


def _per_block(marks: npt.NDArray[np.bool_], lengths: Sequence[int]) -> list[int]:
    """How many marks each block has; no length is 0."""
    firsts = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)
    found: _Counts = np.add.reduceat(marks.astype(np.int64), firsts)
    return [int(one) for one in found]


def _starts(along: Indices, ends: _Counts) -> _Counts:
    """Where each tile begins when the positions of all tiles are counted on without a break."""
    starts = np.zeros(len(ends), np.int64)
    starts[1:] = along[ends[:-1] - 1] + 1
    return starts


def _in_tensor(local: Indices, boxes: Sequence[TileBox], counts: _Counts, cut: Tiling) -> Indices:
    """Positions inside tiles as positions inside the tensor."""
    firsts = np.array([box.row0 * cut.columns + box.column0 for box in boxes], np.int64)
    if cut.across == 1:
        moved: Indices = local + np.repeat(firsts, counts)
        return moved
    widths = {box.column1 - box.column0 for box in boxes}
    width = (
        widths.pop()
        if len(widths) == 1
        else np.repeat(np.array([box.column1 - box.column0 for box in boxes], np.int64), counts)
    )
    down = local // width
    spread: Indices = local + down * (cut.columns - width) + np.repeat(firsts, counts)
    return spread


def _one_by_one(
    blocks: Sequence[bytes], tiles: Sequence[int], cut: Tiling, kind: NumberFormat, backend: Backend
) -> TileBatch:
    """The same slowly: whatever is wrong is found in the block that is wrong."""
    positions, steps = [], []
    for block, tile in zip(blocks, tiles, strict=True):
        found = decode_block(block, kind, cut.box(tile).elements, backend)
        if found.indices is None or found.steps is None:
            message = "a block without positions among those that are decoded together"
            raise BlockError(message)
        positions.append(cut.flat(tile, found.indices))
        steps.append(found.steps)
    ends = np.cumsum([len(one) for one in steps])
    return TileBatch(np.concatenate(positions), np.concatenate(steps), tuple(ends.tolist()))
