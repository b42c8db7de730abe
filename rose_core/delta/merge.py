r"""Several deltas as one, without the weights they apply to.

Merge table (first change, then second change, of one tile):

| first \ second | same | steps | dense |
|---|---|---|---|
| same | same | steps | dense |
| steps | steps | steps added, zeros dropped | dense |
| dense | dense | dense, moved by the steps | dense |

Steps also have an inverse, so a way through the lineage may go back towards an older version;
a dense change has none without its base.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rose_core.delta.bits import NumberFormat
from rose_core.delta.codec import TileChanges, encode_changes, name_of, step
from rose_core.delta.errors import LineageError, ManifestError
from rose_core.delta.manifest import BlockEntry, Manifest
from rose_core.identity import WeightVersion


@dataclass(frozen=True)
class Hop:
    """One manifest on the way, forwards (base to target) or backwards."""

    manifest: Manifest
    back: bool = False

    @property
    def start(self) -> WeightVersion | None:
        """The version this hop leaves from; None for a full manifest."""
        return self.manifest.target if self.back else self.manifest.base

    @property
    def end(self) -> WeightVersion:
        """The version this hop arrives at."""
        if not self.back:
            return self.manifest.target
        if self.manifest.base is None:
            message = f"{self.manifest.target} is full: there is nothing behind it"
            raise LineageError(message)
        return self.manifest.base


Read = Callable[[BlockEntry], bytes]
"""Bytes of a block, not yet checked."""

Write = Callable[[bytes], object]
"""Keeps a block that the merge made."""


def then(
    first: TileChanges | None, second: TileChanges | None, kind: NumberFormat
) -> TileChanges | None:
    """One change after the other; None is *same*."""
    if first is None or second is None or second.values is not None:
        return first if second is None else second
    if second.indices is None or second.steps is None:
        return first
    if first.values is not None:
        values = first.values.copy()
        values[second.indices] = step(values[second.indices], second.steps, kind)
        return TileChanges(values=values)
    if first.indices is None or first.steps is None:
        return second
    indices = np.concatenate((first.indices, second.indices))
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    steps = np.concatenate((first.steps, second.steps))[order]
    starts = np.flatnonzero(np.diff(indices, prepend=-1))
    if not len(starts):
        return None
    steps = np.add.reduceat(steps, starts, dtype=steps.dtype)
    moved = steps != 0
    return TileChanges(indices[starts][moved], steps[moved]) if moved.any() else None


def inverse(changes: TileChanges) -> TileChanges:
    """The change back.

    Raises:
        LineageError: a dense change does not know what was there before.
    """
    if changes.indices is None or changes.steps is None:
        message = "a dense block cannot be taken back without its base"
        raise LineageError(message)
    return TileChanges(changes.indices, changes.steps.dtype.type(0) - changes.steps)


def compose(hops: Sequence[Hop], read: Read, write: Write) -> Manifest:
    """One manifest for a whole way.

    Blocks that only one forward hop touches are listed as they are; the others are merged and
    given to ``write``. Works tile by tile, so memory is a few tiles.

    Args:
        hops: a connected way; the first may be full.
        read: bytes of any block listed by the hops.
        write: called with each new block.

    Returns:
        The manifest from the first hop's start to the last hop's end.

    Raises:
        LineageError: the hops do not connect, or lead back through a dense block.
        BlockError: a block is damaged.
    """
    _check_connected(hops)
    touched: dict[tuple[int, int], list[tuple[Hop, BlockEntry]]] = {}
    for hop in hops:
        for block in hop.manifest.blocks:
            touched.setdefault((block.tensor, block.tile), []).append((hop, block))
    blocks = [_compose_tile(touched[place], read, write) for place in sorted(touched)]
    return _between(hops, tuple(block for block in blocks if block is not None))


def _compose_tile(
    parts: list[tuple[Hop, BlockEntry]], read: Read, write: Write
) -> BlockEntry | None:
    hop, entry = parts[0]
    if len(parts) == 1 and not hop.back:
        return entry
    tensor = hop.manifest.tensors[entry.tensor]
    whole: TileChanges | None = None
    for hop, entry in parts:
        change = hop.manifest.read(entry, read(entry))
        whole = then(whole, inverse(change) if hop.back else change, tensor.kind)
    if whole is None:
        return None
    data = encode_changes(whole, tensor.tiling.box(entry.tile).elements)
    write(data)
    return BlockEntry(entry.tensor, entry.tile, data[0], len(whole), len(data), name_of(data))


def _between(hops: Sequence[Hop], blocks: tuple[BlockEntry, ...]) -> Manifest:
    first, last = hops[0], hops[-1]
    start, end = first.manifest, last.manifest
    return msgspec.structs.replace(
        end,
        base=first.start,
        base_digest=start.digest if first.back else start.base_digest,
        base_tiles=start.tiles if first.back else start.base_tiles,
        target=last.end,
        digest=end.base_digest if last.back else end.digest,
        tiles=end.base_tiles if last.back else end.tiles,
        step=None if last.back else end.step,
        blocks=blocks,
    )


def _check_connected(hops: Sequence[Hop]) -> None:
    if not hops:
        message = "an empty way has no manifest"
        raise LineageError(message)
    _ = hops[-1].end  # raises when the last hop leads behind a full manifest
    for before, after in itertools.pairwise(hops):
        if before.end != after.start:
            message = f"the way breaks between {before.end} and {after.start}"
            raise LineageError(message)
        if before.manifest.tensors != after.manifest.tensors:
            message = f"{after.manifest.target} has other tensors than {before.manifest.target}"
            raise ManifestError(message)
