"""Builds manifests: tensor by tensor, from bits before and after.

``Builder`` keeps nothing but digests and block entries, so a publisher can walk a model of any size
with one tensor in memory. Digests of changed tiles are updated by their changes; unchanged tiles
keep the base's. Next step: ``parts`` does the same for a trainer whose ranks hold shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from rose_core.delta import digest, rice
from rose_core.delta.bits import Bits, Indices, NumberFormat, number_format
from rose_core.delta.codec import (
    Codec,
    compare,
    encode_dense,
    encode_found,
    encode_on_base,
    name_of,
)
from rose_core.delta.codec import found as known
from rose_core.delta.digest import Digest, digest_change, digest_tile
from rose_core.delta.errors import ManifestError
from rose_core.delta.found import FoundTile
from rose_core.delta.manifest import BlockEntry, Manifest, TensorEntry
from rose_core.delta.tiles import tiling
from rose_core.identity import WeightVersion

WORTH_IT = 0.95
"""A block coded on its base is listed only when it is that much smaller: it is slower to read."""


class TensorSpec(NamedTuple):
    """What a tensor is: Hugging Face name, safetensors' word for its type, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def table(specs: Iterable[TensorSpec]) -> tuple[TensorEntry, ...]:
    """The tensor table of a model.

    Raises:
        ManifestError: an element type without rules.
    """
    entries = []
    offset = tiles = 0
    for name, dtype, shape in specs:
        cut = tiling(name, shape)
        entries.append(
            TensorEntry(name, dtype, shape, offset, tiles, cut.tile_rows, cut.tile_columns)
        )
        tiles += cut.count
        offset += entries[-1].elements * number_format(dtype).width
    return tuple(entries)


class Builder:
    """One manifest in the making.

    Args:
        tensors: the tensor table.
        base: manifest of the version the delta starts from; None makes a full manifest.
        emit: called with each block's bytes.
        tied: other names of tensors in the table.
        on_base: code blocks on their base too (``Codec.RICE``), where that is smaller.
    """

    def __init__(
        self,
        tensors: tuple[TensorEntry, ...],
        base: Manifest | None,
        emit: Callable[[bytes], object],
        tied: dict[str, str] | None = None,
        *,
        on_base: bool = False,
    ) -> None:
        if base is not None and base.tensors != tensors:
            message = f"the tensors are not those of base {base.target}"
            raise ManifestError(message)
        self._tensors = tensors
        self._base = base
        self._emit = emit
        self._tied = tied or {}
        self._digests: list[Digest] = []
        self._blocks: list[BlockEntry] = []
        self._smaller: dict[int, BlockEntry] = {}
        self._wants_smaller = on_base
        self._added = 0

    def add(
        self,
        old: Bits | None,
        new: Bits,
        changed: Indices | None = None,
        *,
        blocks: bool = True,
    ) -> int:
        """Add the next tensor of the table.

        Args:
            old: flat bits in the base; None when there is none.
            new: flat bits in the target.
            changed: ascending positions where they differ, where that is known (``casting``).
            blocks: False only takes the digests (a bare manifest).

        Returns:
            Number of changed elements.

        Raises:
            ManifestError: the bits are not the tensor's.
        """
        number = self._added
        tensor = self._tensors[number]
        if new.dtype != tensor.kind.unsigned or new.size != tensor.elements:
            message = f"{tensor.name}: {new.size} elements of {new.dtype}, want {tensor}"
            raise ManifestError(message)
        self._added += 1
        if old is None or self._base is None:
            for tile in range(tensor.tiling.count):
                self._dense(number, tile, new, blocks)
            return new.size
        tiles = range(tensor.tiling.count)
        return sum(self._sparse(number, tile, (old, new), changed) for tile in tiles)

    def add_found(self, tiles: Iterable[FoundTile]) -> int:
        """Add the next tensor of the table, compared with the base where it lies (``found``).

        Args:
            tiles: its tiles that changed.

        Returns:
            Number of changed elements.

        Raises:
            ManifestError: there is no base.
        """
        number, base = self._added, self._base
        tensor = self._tensors[number]
        if base is None:
            message = f"{tensor.name}: changes without a base"
            raise ManifestError(message)
        self._added += 1
        changed = {one.tile: one for one in tiles}
        for tile in range(tensor.tiling.count):
            before = self._base_digest(tensor, tile)
            one = changed.get(tile)
            self._digests.append(before if one is None else before.plus(one.moved))
            if one is not None:
                block = self._keep(number, tile, one.block(), one.changes)
                if self._wants_smaller:
                    self._keep_smaller(block, one.block_on_base, tensor.kind)
        return sum(one.changes for one in changed.values())

    def finish(self, target: WeightVersion, step: int | None = None) -> Manifest:
        """The manifest; every tensor must have been added.

        Raises:
            ManifestError: some are missing.
        """
        if self._added != len(self._tensors):
            message = f"{self._added} of {len(self._tensors)} tensors were added"
            raise ManifestError(message)
        base = self._base
        return Manifest(
            target=target,
            base=None if base is None else base.target,
            digest=str(digest.total(self._digests)),
            base_digest="" if base is None else base.digest,
            step=step,
            tensors=self._tensors,
            tied=self._tied,
            tiles=digest.to_bytes(self._digests),
            base_tiles=b"" if base is None else base.tiles,
            blocks=tuple(self._blocks),
        )

    def on_base(self, manifest: Manifest) -> Manifest | None:
        """The finished manifest with blocks coded on the base in place of larger ones.

        None when there are none. It makes the same version; a receiver needs the base's bits to
        read it, so it is for those that say they can.
        """
        if not self._smaller:
            return None
        blocks = tuple(
            self._smaller.get(place, block) for place, block in enumerate(manifest.blocks)
        )
        return msgspec.structs.replace(manifest, blocks=blocks)

    def _dense(self, number: int, tile: int, new: Bits, blocks: bool) -> None:
        tensor = self._tensors[number]
        self._digests.append(digest_tile(tensor.name, new, tensor.tiling, tile))
        if blocks:
            part = tensor.tiling.cut(new, tile)
            self._keep(number, tile, encode_dense(part), len(part))

    def _sparse(
        self, number: int, tile: int, states: tuple[Bits, Bits], changed: Indices | None
    ) -> int:
        tensor = self._tensors[number]
        cut, kind = tensor.tiling, tensor.kind
        before, after = (cut.cut(state, tile) for state in states)
        digest_before = self._base_digest(tensor, tile)
        if changed is None:
            found = compare(before, after, kind)
        else:
            local = cut.local(tile, changed)
            found = known(local, before[local], after[local], kind)
        if not len(found.indices):
            self._digests.append(digest_before)
            return 0
        where = cut.flat(tile, found.indices)
        moved = digest_change(tensor.name, where, found.before, found.after)
        self._digests.append(digest_before.plus(moved))
        block = self._keep(number, tile, encode_found(found.changes, after), len(found.indices))
        if self._wants_smaller:
            self._keep_smaller(block, lambda: encode_on_base(before, found.changes, kind), kind)
        return len(found.indices)

    def _keep_smaller(
        self, block: BlockEntry, make: Callable[[], bytes], kind: NumberFormat
    ) -> None:
        if block.codec != Codec.STEPS or kind.width > rice.WIDEST:
            return
        data = make()
        if len(data) <= WORTH_IT * block.size:
            self._emit(data)
            self._smaller[len(self._blocks) - 1] = entry(
                block.tensor, block.tile, data, block.changes
            )

    def _base_digest(self, tensor: TensorEntry, tile: int) -> Digest:
        if self._base is None:
            return digest.NOTHING
        return self._base.tile_digests[tensor.first_tile + tile]

    def _keep(self, number: int, tile: int, data: bytes, changes: int) -> BlockEntry:
        self._emit(data)
        self._blocks.append(entry(number, tile, data, changes))
        return self._blocks[-1]


def entry(tensor: int, tile: int, data: bytes, changes: int) -> BlockEntry:
    """How a manifest lists a block."""
    return BlockEntry(tensor, tile, data[0], changes, len(data), name_of(data))
