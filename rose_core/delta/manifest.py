"""The manifest of a version: what it is made of, and how to know that one holds it.

A manifest is complete in itself: a receiver needs it and the blocks it lists, nothing else. With a
base it describes a delta; without one it is *full* and every tile has a dense block, or *bare* and
lists no block: then it only says what the state's digests are, for receivers that hold the state
already. It is encoded as MessagePack and named by its SHA-256.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator

import msgspec
import numpy as np

from rose_core.delta.bits import Bits, Indices, NumberFormat, number_format
from rose_core.delta.codec import TileChanges, check_block, decode_block
from rose_core.delta.digest import Digest, from_bytes, total_of
from rose_core.delta.errors import ManifestError
from rose_core.delta.tiles import Tiling, as_matrix
from rose_core.identity import WeightVersion
from rose_core.unreadable import UNREADABLE

FORMAT = "rose-delta/1"
DIGEST_BYTES = 16


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor; tied names appear once, under ``Manifest.tied``.

    Attributes:
        name: Hugging Face name.
        dtype: the word safetensors uses, for example ``BF16``.
        offset: position of the first byte when all tensors are laid end to end in table order.
        first_tile: number of its first tile in the manifest's tile table.
        tile_rows, tile_columns: size of its tiles (``tiles.Tiling``).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    first_tile: int
    tile_rows: int
    tile_columns: int

    @property
    def kind(self) -> NumberFormat:
        """The element format."""
        return number_format(self.dtype)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def tiling(self) -> Tiling:
        """How the tensor is cut."""
        return Tiling(*as_matrix(self.shape), self.tile_rows, self.tile_columns)


class BlockEntry(msgspec.Struct, frozen=True, array_like=True):
    """One changed tile.

    Attributes:
        tensor: position in the tensor table.
        tile: number of the tile inside its tensor.
        codec: the block's codec tag (``codec.Codec``).
        changes: elements that differ from the base.
        size: bytes of the block.
        sha256: content address.
    """

    tensor: int
    tile: int
    codec: int
    changes: int
    size: int
    sha256: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """A version of a run, as a delta or in full.

    Attributes:
        target: the version this makes.
        base: the version it starts from; None = full.
        digest: digest of the target's whole state, 32 hexadecimal digits.
        base_digest: the same of the base.
        step: the trainer's own step; a label, nothing compares it.
        tensors: every tensor of the model, changed or not.
        tied: other names of tensors in the table, name -> name in the table.
        tiles: digest of every tile of the target, 16 bytes each, in tensor order.
        base_tiles: the same of the base; empty without one.
        blocks: changed tiles, in tensor and tile order.
    """

    format: str = FORMAT
    target: WeightVersion
    base: WeightVersion | None = None
    digest: str
    base_digest: str = ""
    step: int | None = None
    tensors: tuple[TensorEntry, ...]
    tied: dict[str, str] = {}
    tiles: bytes
    base_tiles: bytes = b""
    blocks: tuple[BlockEntry, ...] = ()

    def encode(self) -> bytes:
        """The manifest as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read and check a manifest.

        Raises:
            ManifestError: not a manifest, or one that contradicts itself.
        """
        try:
            manifest = msgspec.msgpack.decode(data, type=cls)
        except UNREADABLE as error:
            message = f"not a manifest: {error}"
            raise ManifestError(message) from error
        check(manifest)
        return manifest

    @functools.cached_property
    def name(self) -> str:
        """Content address: SHA-256 of the encoded manifest, hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def bare(self) -> bool:
        """No base and no blocks: only states the digests."""
        return self.base is None and not self.blocks and bool(self.tiles)

    @property
    def changes(self) -> int:
        """Elements that differ from the base (all of them when full)."""
        return sum(block.changes for block in self.blocks)

    @property
    def elements(self) -> int:
        """Elements of the model."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def state_bytes(self) -> int:
        """Size of the whole state."""
        return sum(tensor.elements * tensor.kind.width for tensor in self.tensors)

    @property
    def block_bytes(self) -> int:
        """Size of all blocks."""
        return sum(block.size for block in self.blocks)

    @functools.cached_property
    def tile_digests(self) -> list[Digest]:
        """Digest of every tile of the target."""
        return from_bytes(self.tiles)

    @functools.cached_property
    def base_tile_digests(self) -> list[Digest]:
        """Digest of every tile of the base; empty without one."""
        return from_bytes(self.base_tiles)

    def tile_number(self, block: BlockEntry) -> int:
        """Position of a block's tile in the tile tables."""
        return self.tensors[block.tensor].first_tile + block.tile

    def read(self, block: BlockEntry, data: bytes, base: Bits | None = None) -> TileChanges:
        """Check and decode one block; positions are inside the tile.

        Args:
            block: the entry.
            data: the block's bytes.
            base: bits of the tile in the base, for codecs that cannot be read without.

        Raises:
            BlockError: the bytes are not the block.
        """
        check_block(data, block.sha256)
        tensor = self.tensors[block.tensor]
        elements = tensor.tiling.box(block.tile).elements
        return decode_block(data, tensor.kind, elements, base=base)

    def positions(self, block: BlockEntry, changes: TileChanges) -> Indices:
        """Positions inside the block's tensor (flat, ascending per row) of what it changes."""
        tiling = self.tensors[block.tensor].tiling
        indices = changes.indices
        if indices is None:
            indices = np.arange(tiling.box(block.tile).elements)
        return tiling.flat(block.tile, indices)

    def blocks_by_tensor(self) -> Iterator[tuple[TensorEntry, list[BlockEntry]]]:
        """Every changed tensor with its blocks."""
        found: dict[int, list[BlockEntry]] = {}
        for block in self.blocks:
            found.setdefault(block.tensor, []).append(block)
        return ((self.tensors[number], blocks) for number, blocks in found.items())


def check(manifest: Manifest) -> None:
    """Refuse what contradicts itself, before anything is fetched or applied.

    Raises:
        ManifestError: says what and where.
    """
    if manifest.format != FORMAT:
        message = f"format {manifest.format!r}; this build reads {FORMAT!r}"
        raise ManifestError(message)
    tiles = _check_tensors(manifest.tensors)
    for label, table, digest in (
        ("target", manifest.tiles, manifest.digest),
        ("base", manifest.base_tiles, manifest.base_digest),
    ):
        if label == "base" and manifest.base is None:
            continue
        if len(table) != tiles * DIGEST_BYTES:
            message = f"{manifest.target}: {len(table)} bytes of {label} digests, {tiles} tiles"
            raise ManifestError(message)
        if str(total_of(table)) != digest:
            message = f"{manifest.target}: the {label} digest is not the sum of its tiles"
            raise ManifestError(message)
    _check_blocks(manifest, tiles)
    names = {tensor.name for tensor in manifest.tensors}
    for alias, name in manifest.tied.items():
        if name not in names or alias in names:
            message = f"{manifest.target}: {alias!r} is tied to {name!r}, which cannot be"
            raise ManifestError(message)


def _check_tensors(tensors: tuple[TensorEntry, ...]) -> int:
    tiles = offset = 0
    names: set[str] = set()
    for tensor in tensors:
        width = tensor.kind.width
        sensible = min(tensor.tile_rows, tensor.tile_columns) > 0 and min((0, *tensor.shape)) == 0
        if not sensible or tensor.name in names:
            message = f"tensor {tensor.name!r} is listed twice or has an impossible shape"
            raise ManifestError(message)
        if (tensor.first_tile, tensor.offset) != (tiles, offset):
            message = f"tensor {tensor.name!r} does not follow the one before it"
            raise ManifestError(message)
        names.add(tensor.name)
        tiles += tensor.tiling.count
        offset += tensor.elements * width
    return tiles


def _check_blocks(manifest: Manifest, tiles: int) -> None:
    last = -1
    for block in manifest.blocks:
        if not 0 <= block.tensor < len(manifest.tensors):
            message = f"{manifest.target}: a block of tensor number {block.tensor}"
            raise ManifestError(message)
        tensor = manifest.tensors[block.tensor]
        number = tensor.first_tile + block.tile
        if not 0 <= block.tile < tensor.tiling.count or number <= last:
            message = f"{manifest.target}: block {block.tile} of {tensor.name} is out of order"
            raise ManifestError(message)
        if len(block.sha256) != 32 or block.size < 0:
            message = f"{manifest.target}: block {block.tile} of {tensor.name} has no valid name"
            raise ManifestError(message)
        last = number
    if manifest.base is None and manifest.blocks and len(manifest.blocks) != tiles:
        message = f"{manifest.target}: full, yet {len(manifest.blocks)} blocks for {tiles} tiles"
        raise ManifestError(message)
