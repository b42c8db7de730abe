"""A version made of parts: every rank of a sharded trainer describes the tiles it owns.

No rank ever holds the whole model. Tiles are cut so that a rank owns whole ones (``aligned``), each
rank compares and encodes its own, and whoever has the parts of all ranks puts the manifest
together: all parts or nothing. Next step: the store assembles, ``rose_trainer.sharded`` publishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from rose_core.delta import digest
from rose_core.delta.bits import Bits, number_format
from rose_core.delta.build import TensorSpec, entry
from rose_core.delta.codec import compare, encode_dense, encode_found
from rose_core.delta.digest import Digest, digest_change, digest_run
from rose_core.delta.errors import ManifestError
from rose_core.delta.found import FoundTile
from rose_core.delta.manifest import BlockEntry, Manifest, TensorEntry
from rose_core.delta.tiles import TileBox, as_matrix, tiling
from rose_core.identity import WeightVersion


class RankPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's share of a version.

    Attributes:
        target, base, step: as in the manifest; the same in every part.
        rank, world: whose part, of how many.
        tensors, tied: the whole model's; only in a full version, else the base's hold.
        tiles: numbers of the tiles this rank owns, in the model's tile table, ascending.
        digests: their digests in the target, 16 bytes each.
        blocks: blocks of those that changed.
    """

    target: WeightVersion
    base: WeightVersion | None = None
    step: int | None = None
    rank: int
    world: int
    tensors: tuple[TensorEntry, ...] = ()
    tied: dict[str, str] = {}
    tiles: tuple[int, ...]
    digests: bytes
    blocks: tuple[BlockEntry, ...] = ()


class OwnedTensor(msgspec.Struct, frozen=True):
    """A tensor and the box of its matrix that this rank holds.

    Attributes:
        chunk: rows and columns that every rank's box is a multiple of, except at the far edges;
            tiles are cut to fit into it.
    """

    spec: TensorSpec
    box: TileBox
    chunk: tuple[int, int]


def aligned(owned: Iterable[OwnedTensor]) -> tuple[TensorEntry, ...]:
    """The tensor table with tiles that no two ranks share; the same on every rank."""
    entries = []
    offset = tiles = 0
    for one in owned:
        name, dtype, shape = one.spec
        rows, columns = as_matrix(shape)
        cut = tiling(name, shape)
        tile_rows = _fitting(cut.tile_rows, rows, one.chunk[0])
        tile_columns = _fitting(cut.tile_columns, columns, one.chunk[1])
        entries.append(TensorEntry(name, dtype, shape, offset, tiles, tile_rows, tile_columns))
        tiles += entries[-1].tiling.count
        offset += entries[-1].elements * number_format(dtype).width
    return tuple(entries)


class PartBuilder:
    """One rank's part in the making.

    Args:
        tensors: the table that ``aligned`` made.
        known: digest of every tile this rank owns in the base; None makes a full part.
        emit: called with each block's bytes.
    """

    def __init__(
        self,
        tensors: tuple[TensorEntry, ...],
        known: dict[int, Digest] | None,
        emit: Callable[[bytes], object],
    ) -> None:
        self._tensors = tensors
        self._known = known
        self._emit = emit
        self._blocks: list[BlockEntry] = []
        self.digests: dict[int, Digest] = {}

    def add(
        self, number: int, box: TileBox, old: Bits | None, new: Bits, *, blocks: bool = True
    ) -> None:
        """Add this rank's box of tensor ``number``; bits of the box, row-major.

        Args:
            number: of the tensor.
            box: what this rank holds of it.
            old: bits in the base; None when there is none.
            new: bits in the target.
            blocks: False only takes the digests of a state that has no base.

        Raises:
            ManifestError: the box cuts through a tile, or the bits are not the box's.
        """
        tensor = self._tensors[number]
        if new.dtype != tensor.kind.unsigned or new.size != box.elements:
            message = f"{tensor.name}: {new.size} elements of {new.dtype} for {box}"
            raise ManifestError(message)
        width, known = box.column1 - box.column0, self._known
        for tile in inside(tensor, box):
            where = tensor.tiling.box(tile)
            after = _cut(new, box, where, width)
            if old is None or known is None:
                self._dense(number, tile, after, blocks=blocks)
            else:
                before = _cut(old, box, where, width)
                self._sparse(number, tile, known[tensor.first_tile + tile], (before, after))

    def add_found(self, number: int, box: TileBox, tiles: Iterable[FoundTile]) -> None:
        """Add this rank's box of tensor ``number``, compared with the base where it lies.

        Args:
            number: of the tensor.
            box: what this rank holds of it.
            tiles: its tiles that changed.

        Raises:
            ManifestError: the box cuts through a tile, or there is no base.
        """
        tensor, changed = self._tensors[number], {one.tile: one for one in tiles}
        if self._known is None:
            message = f"{tensor.name}: changes without a base"
            raise ManifestError(message)
        for tile in inside(tensor, box):
            place, one = tensor.first_tile + tile, changed.get(tile)
            before = self._known[place]
            self.digests[place] = before if one is None else before.plus(one.moved)
            if one is not None:
                self._keep(number, tile, one.block(), one.changes)

    def finish(
        self,
        target: WeightVersion,
        rank: int,
        world: int,
        *,
        base: WeightVersion | None = None,
        tied: dict[str, str] | None = None,
        step: int | None = None,
    ) -> RankPart:
        """The part."""
        tiles = tuple(sorted(self.digests))
        return RankPart(
            target=target,
            base=base,
            step=step,
            rank=rank,
            world=world,
            tensors=self._tensors if base is None else (),
            tied=(tied or {}) if base is None else {},
            tiles=tiles,
            digests=digest.to_bytes(self.digests[tile] for tile in tiles),
            blocks=tuple(self._blocks),
        )

    def _dense(self, number: int, tile: int, after: Bits, *, blocks: bool) -> None:
        tensor = self._tensors[number]
        place = tensor.first_tile + tile
        self.digests[place] = _digest(tensor, tensor.tiling.box(tile), after)
        if blocks:
            self._keep(number, tile, encode_dense(after), len(after))

    def _sparse(self, number: int, tile: int, known: Digest, states: tuple[Bits, Bits]) -> None:
        tensor = self._tensors[number]
        before, after = states
        found = compare(before, after, tensor.kind)
        where = tensor.tiling.flat(tile, found.indices)
        moved = digest_change(tensor.name, where, found.before, found.after)
        self.digests[tensor.first_tile + tile] = known.plus(moved)
        if len(found.indices):
            self._keep(number, tile, encode_found(found.changes, after), len(found.indices))

    def _keep(self, number: int, tile: int, data: bytes, changes: int) -> None:
        self._emit(data)
        self._blocks.append(entry(number, tile, data, changes))


def assemble(parts: Sequence[RankPart], base: Manifest | None) -> Manifest:
    """The manifest of all parts together.

    Args:
        parts: one of every rank.
        base: the manifest of their base, None for a full version.

    Raises:
        ManifestError: a rank is missing, parts contradict each other, or tiles are missing.
    """
    first = min(parts, key=lambda part: part.rank)
    _check_parts(parts, first)
    tensors, tied = (first.tensors, first.tied) if base is None else (base.tensors, base.tied)
    count = sum(tensor.tiling.count for tensor in tensors)
    given = np.concatenate([np.array(part.tiles, np.int64) for part in parts])
    if not np.array_equal(np.sort(given), np.arange(count)):
        message = (
            f"{first.target}: the parts describe {len(given)} tiles, {len(set(given.tolist()))} "
            f"different ones, where the model has {count}; every tile has exactly one owner"
        )
        raise ManifestError(message)
    table = np.concatenate([np.frombuffer(part.digests, "<u8").reshape(-1, 2) for part in parts])
    ordered = table[np.argsort(given)]
    blocks = sorted(
        (block for part in parts for block in part.blocks),
        key=lambda block: (block.tensor, block.tile),
    )
    return Manifest(
        target=first.target,
        base=first.base,
        digest=str(digest.total(digest.from_bytes(ordered.tobytes()))),
        base_digest="" if base is None else base.digest,
        step=first.step,
        tensors=tensors,
        tied=tied,
        tiles=ordered.tobytes(),
        base_tiles=b"" if base is None else base.tiles,
        blocks=tuple(blocks),
    )


def _check_parts(parts: Sequence[RankPart], first: RankPart) -> None:
    if sorted(part.rank for part in parts) != list(range(first.world)):
        message = f"{first.target}: parts of ranks {[part.rank for part in parts]}"
        raise ManifestError(message)
    for part in parts:
        same = (part.target, part.base, part.step, part.world, part.tensors, part.tied)
        if same != (first.target, first.base, first.step, first.world, first.tensors, first.tied):
            message = f"{first.target}: rank {part.rank} describes another version or model"
            raise ManifestError(message)
        if len(part.digests) != digest_bytes(len(part.tiles)):
            message = f"{first.target}: rank {part.rank} gives other digests than tiles"
            raise ManifestError(message)


def digest_bytes(tiles: int) -> int:
    """Bytes that the digests of so many tiles take."""
    return 16 * tiles


def _fitting(tile: int, whole: int, chunk: int) -> int:
    """The largest tile side up to ``tile`` that divides the chunk; no chunk = no constraint."""
    if chunk >= whole:
        return max(tile, 1)
    small = [part for part in range(1, math.isqrt(chunk) + 1) if chunk % part == 0]
    divisors = {*small, *(chunk // part for part in small)}
    return max(part for part in divisors if part <= max(tile, 1))


def inside(tensor: TensorEntry, box: TileBox) -> list[int]:
    """Numbers of the tiles of a box, row by row.

    Raises:
        ManifestError: the box cuts through a tile.
    """
    cut = tensor.tiling
    if not box.elements:
        return []
    ends = (box.row1 == cut.rows or box.row1 % cut.tile_rows == 0) and (
        box.column1 == cut.columns or box.column1 % cut.tile_columns == 0
    )
    if not ends or box.row0 % cut.tile_rows or box.column0 % cut.tile_columns:
        message = f"{tensor.name}: {box} cuts through tiles of {cut}"
        raise ManifestError(message)
    rows = range(box.row0 // cut.tile_rows, -(-box.row1 // cut.tile_rows))
    columns = range(box.column0 // cut.tile_columns, -(-box.column1 // cut.tile_columns))
    return [row * cut.across + column for row in rows for column in columns]


def _cut(bits: Bits, box: TileBox, tile: TileBox, width: int) -> Bits:
    matrix = bits.reshape(-1, width)
    part = matrix[
        tile.row0 - box.row0 : tile.row1 - box.row0,
        tile.column0 - box.column0 : tile.column1 - box.column0,
    ]
    return np.ascontiguousarray(part).reshape(-1)


def _digest(tensor: TensorEntry, box: TileBox, bits: Bits) -> Digest:
    width = box.column1 - box.column0
    columns = tensor.tiling.columns
    if width == columns:
        return digest_run(tensor.name, box.row0 * columns, bits)
    return digest.total(
        digest_run(tensor.name, (box.row0 + row) * columns + box.column0, line)
        for row, line in enumerate(bits.reshape(-1, width))
    )
