"""Live weights of an engine, seen in canonical coordinates, and how a bundle reaches them.

Canonical means Hugging Face tensor name and flat index; whatever the engine fuses or pads is
hidden behind ``LiveTensor``. A bundle is *staged* beside the serving engine: old and new bits of
every changed element, checked against the manifest's tile digests. It is *committed* between two
iterations: scatter, recompute the digests of the touched tensors on the live weights, or put the
old bits back. Next step: ``rose_engines.session`` says when which of the two may happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from rose_core.delta.bits import Bits, Indices, number_format
from rose_core.delta.codec import decode_block, encode_tile
from rose_core.delta.digest import Digest, digest_run, total
from rose_core.delta.errors import BlockError, ManifestError
from rose_core.delta.manifest import BlockEntry, Manifest, TensorEntry
from rose_engines.errors import BrokenWeights, CommitRefused

Where = slice | Indices


class LiveTensor(Protocol):
    """One canonical tensor inside the engine, flat, as unsigned integers of its bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def take(self, where: Where) -> Bits:
        """A copy of these elements, in host memory."""
        ...

    def put(self, where: Where, bits: Bits) -> None:
        """Overwrite these elements."""
        ...

    def all_bits(self) -> Bits:
        """Every element in host memory: a view where possible, else a copy."""
        ...


@dataclass
class HostTensor:
    """A tensor in host memory: ``flat`` is (a view of) the storage the engine computes with."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    flat: Bits

    def take(self, where: Where) -> Bits:
        """A copy of these elements."""
        return np.array(self.flat[where])

    def put(self, where: Where, bits: Bits) -> None:
        """Overwrite these elements."""
        self.flat[where] = bits

    def all_bits(self) -> Bits:
        """The storage itself."""
        return self.flat


Live = Mapping[str, LiveTensor]


def host_tensors(state: Mapping[str, tuple[str, tuple[int, ...], Bits]]) -> dict[str, LiveTensor]:
    """Tensors from name -> (dtype word, shape, flat bits)."""
    return {name: HostTensor(name, *parts) for name, parts in state.items()}


def digest_live(live: Live) -> Digest:
    """Digest of the whole state, read from the live weights."""
    return total(
        digest_run(name, 0, np.ascontiguousarray(tensor.all_bits()))
        for name, tensor in live.items()
    )


def warm_up(live: Live) -> None:
    """Compile what staging needs, for every element type of the engine.

    Compiling takes a second in which no other thread of the process runs, so it is done before the
    engine serves and not beside it.
    """
    for word in sorted({tensor.dtype for tensor in live.values()}):
        kind = number_format(word)
        old = np.zeros(64, kind.unsigned)
        new = old.copy()
        new[[3, 60]] = 1
        block, _ = encode_tile(old, new, kind, backend="numpy")
        decode_block(block, kind, len(old)).resolve(old[[3, 60]], kind)


@dataclass(frozen=True)
class TileChange:
    """Staged elements of one tile.

    Attributes:
        where: flat positions in the tensor.
        old, new: bits before and after, in the order of ``where``.
    """

    tensor: TensorEntry
    where: Where
    old: Bits
    new: Bits


@dataclass(frozen=True)
class StagedUpdate:
    """A bundle ready to be committed; holds the undo log too.

    Attributes:
        current: digest of the live weights it was staged against.
    """

    manifest: Manifest
    current: Digest
    changes: tuple[TileChange, ...]

    @property
    def version(self) -> str:
        """Label of the version this makes."""
        return str(self.manifest.target)

    @property
    def staged_bytes(self) -> int:
        """Memory of positions, old and new bits."""
        return sum(
            change.old.nbytes
            + change.new.nbytes
            + (0 if isinstance(change.where, slice) else change.where.nbytes)
            for change in self.changes
        )


def read_manifest(bundle: Path) -> Manifest:
    """The manifest of a bundle folder.

    Raises:
        CommitRefused: ``Corrupt``: missing, damaged or of another format.
    """
    try:
        return Manifest.decode((bundle / "manifest.msgpack").read_bytes())
    except OSError as error:
        raise CommitRefused("Corrupt", f"no manifest in {bundle}: {error}") from error
    except ManifestError as error:
        raise CommitRefused("Corrupt", f"manifest of {bundle}: {error}") from error


def stage(bundle: Path, live: Live, current: Digest) -> StagedUpdate:
    """Decode a bundle and check it against the live weights, touching nothing.

    Args:
        bundle: folder with ``manifest.msgpack`` and ``blocks/<sha256 hex>``.
        live: the engine's weights; nobody else writes them meanwhile.
        current: their attested digest.

    Raises:
        CommitRefused: ``Layout``, ``WrongBase``, ``Corrupt`` or ``DigestMismatch``.
    """
    manifest = read_manifest(bundle)
    check_layout(manifest, live)
    if manifest.base is not None and manifest.base_digest != str(current):
        raise CommitRefused(
            "WrongBase",
            f"{manifest.target} starts from {manifest.base} with digest {manifest.base_digest}; "
            f"the engine holds {current}",
        )
    _check_untouched(manifest)
    return StagedUpdate(manifest, current, tuple(_stage_tiles(manifest, bundle / "blocks", live)))


def check_layout(manifest: Manifest, live: Live) -> None:
    """Refuse a model that is not the engine's, naming the first difference.

    Raises:
        CommitRefused: ``Layout``.
    """
    table = {entry.name: entry for entry in manifest.tensors}
    missing = sorted(table.keys() ^ live.keys())
    if missing:
        owner = "the bundle" if missing[0] in table else "the engine"
        raise CommitRefused(
            "Layout", f"only {owner} has tensor {missing[0]!r} ({len(missing)} such names)"
        )
    for name, entry in table.items():
        tensor = live[name]
        if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            raise CommitRefused(
                "Layout",
                f"tensor {name!r} is {entry.dtype}{list(entry.shape)} in the bundle and "
                f"{tensor.dtype}{list(tensor.shape)} in the engine",
            )


def _check_untouched(manifest: Manifest) -> None:
    """Tiles without a block must keep their digest, or the manifest hides a change."""
    if manifest.base is None:
        return
    touched = {manifest.tile_number(block) for block in manifest.blocks}
    pairs = zip(manifest.base_tile_digests, manifest.tile_digests, strict=True)
    for number, (before, after) in enumerate(pairs):
        if number not in touched and before != after:
            raise CommitRefused("Corrupt", f"tile {number} changes but no block says how")


def _stage_tiles(manifest: Manifest, blocks: Path, live: Live) -> Iterator[TileChange]:
    for block in manifest.blocks:
        entry = manifest.tensors[block.tensor]
        try:
            data = (blocks / block.sha256.hex()).read_bytes()
            decoded = manifest.read(block, data)
        except OSError as error:
            raise CommitRefused("Corrupt", f"a block of {entry.name} is missing") from error
        except BlockError as error:
            raise CommitRefused("Corrupt", f"{entry.name}: {error}") from error
        where = _positions(entry, block, decoded.indices)
        old = live[entry.name].take(where)
        new = decoded.resolve(old, number_format(entry.dtype))
        yield TileChange(entry, where, old, new)


def _positions(entry: TensorEntry, block: BlockEntry, local: Indices | None) -> Where:
    """Where a block's elements lie in the flat tensor; a slice when they are contiguous."""
    cut = entry.tiling
    if local is not None:
        return cut.flat(block.tile, local)
    box = cut.box(block.tile)
    if box.column1 - box.column0 == cut.columns:
        first = box.row0 * cut.columns
        return slice(first, first + box.elements)
    return cut.flat(block.tile, np.arange(box.elements, dtype=np.int64))


def commit(update: StagedUpdate, live: Live) -> Digest:
    """Swap the staged elements in and attest the touched tensors; all or nothing.

    Only between two iterations. Untouched tensors keep the digest they were attested with.

    Returns:
        The digest of the whole state.

    Raises:
        CommitRefused: ``DigestMismatch``; the old bits are back and were checked.
        BrokenWeights: they are not; the engine must not compute any more.
    """
    for change in update.changes:
        live[change.tensor.name].put(change.where, change.new)
    wrong = _first_wrong(update, live)
    if wrong is None:
        return Digest.parse(update.manifest.digest)
    for change in update.changes:
        live[change.tensor.name].put(change.where, change.old)
    left = digest_live(live)
    if left != update.current:
        raise BrokenWeights(
            f"{update.version}: {wrong}; after the undo the weights have digest {left} instead of "
            f"{update.current}"
        )
    raise CommitRefused("DigestMismatch", f"{update.version}: {wrong}; the old weights are back")


def _first_wrong(update: StagedUpdate, live: Live) -> str | None:
    """The first touched tensor whose live digest is not the sum of the manifest's tile digests.

    Whole tensors are read, in one run each: that covers their untouched tiles too, and is much
    faster than tiles that are cut along columns.
    """
    manifest = update.manifest
    touched = {change.tensor.name: change.tensor for change in update.changes}
    for name, entry in touched.items():
        found = digest_run(name, 0, np.ascontiguousarray(live[name].all_bits()))
        end = entry.first_tile + entry.tiling.count
        wanted = total(manifest.tile_digests[entry.first_tile : end])
        if found != wanted:
            return f"{name} has digest {found} instead of {wanted}"
    return None
