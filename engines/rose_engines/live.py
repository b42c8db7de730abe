"""Live weights of an engine, seen in canonical coordinates, and how a bundle reaches them.

Canonical means Hugging Face tensor name and flat index; whatever the engine fuses or pads is
hidden behind ``LiveTensor``. A bundle is *staged* beside the serving engine: old and new bits of
every changed element, checked against the manifest's tile digests. It is *committed* between two
iterations, in time that grows with the changes alone: scatter and read back, or put the old bits
back. Then it is *confirmed* beside the serving engine: the digests of the touched tensors are
recomputed on the live weights. Next step: ``rose_engines.session`` says when each may happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rose_core.delta import faults, rice
from rose_core.delta.bits import Bits, Indices, number_format
from rose_core.delta.codec import (
    SELF_CONTAINED,
    Changes,
    Codec,
    decode_block,
    encode_on_base,
    encode_tile,
    find_changes,
)
from rose_core.delta.digest import NOTHING, Digest, digest_at, digest_change, total
from rose_core.delta.errors import BlockError, ManifestError
from rose_core.delta.manifest import BlockEntry, Manifest, TensorEntry
from rose_engines.errors import BrokenWeights, CommitRefused
from rose_engines.tensors import HostTensor, Live, LiveTensor, Where, WholeTensor, host_tensors

__all__ = [
    "HostTensor",
    "Live",
    "LiveTensor",
    "StagedUpdate",
    "TileChange",
    "Where",
    "WholeTensor",
    "commit",
    "confirm",
    "digest_live",
    "host_tensors",
    "readable",
    "revert",
    "stage",
    "warm_up",
]


def digest_live(live: Live) -> Digest:
    """Digest of everything that is held here, read from the live weights."""
    return total(tensor.digest() for tensor in live.values())


def readable(live: Live) -> tuple[int, ...]:
    """Codecs that bundles for these weights may use.

    Blocks coded on their base need the whole tile's old bits: free where the weights are in host
    memory, a copy of nearly the whole model where they are on a device.
    """
    host = all(isinstance(tensor, HostTensor) for tensor in live.values())
    return tuple(map(int, SELF_CONTAINED + ((Codec.RICE,) if host else ())))


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
        if Codec.RICE in readable(live) and kind.width <= rice.WIDEST:
            block = encode_on_base(old, find_changes(old, new, kind, "numpy"), kind, "numpy")
            decode_block(block, kind, len(old), base=old)


@dataclass(frozen=True)
class TileChange:
    """Staged elements of one tile.

    Attributes:
        where: places in the live tensor.
        old, new: bits before and after, in the order of ``where``.
        moved: what this adds to the digest.
    """

    tensor: TensorEntry
    where: Where
    old: Bits
    new: Bits
    moved: Digest = NOTHING


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


def stage(
    bundle: Path, live: Live, current: Digest, rest: Callable[[], None] = lambda: None
) -> StagedUpdate:
    """Decode a bundle and check it against the live weights, touching nothing.

    Args:
        bundle: folder with ``manifest.msgpack`` and ``blocks/<sha256 hex>``.
        live: the engine's weights; nobody else writes them meanwhile.
        current: their attested digest.
        rest: called after every tile; may take its time.

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
    changes = []
    for change in _stage_tiles(manifest, bundle / "blocks", live):
        changes.append(change)
        rest()
    return StagedUpdate(manifest, current, tuple(changes))


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
        cut = entry.tiling
        if not live[entry.name].touches(cut.box(block.tile), cut.columns):
            continue  # another rank's
        try:
            data = (blocks / block.sha256.hex()).read_bytes()
            base = _base_of(entry, block, live)
            decoded = manifest.read(block, data, base)
        except OSError as error:
            raise CommitRefused("Corrupt", f"a block of {entry.name} is missing") from error
        except BlockError as error:
            raise CommitRefused("Corrupt", f"{entry.name}: {error}") from error
        faults.at("engine.stage.tile")
        positions = _positions(entry, block, decoded.indices)
        where, kept = live[entry.name].own(positions)
        old = live[entry.name].take(where)
        new = _only(decoded, kept).resolve(old, number_format(entry.dtype))
        named = _listed(positions)
        moved = digest_change(entry.name, named if kept is None else named[kept], old, new)
        if kept is None:
            _check_tile(manifest, block, moved, digest_at(entry.name, named, old))
        yield TileChange(entry, where, old, new, moved)


def _listed(where: Where) -> Indices:
    if isinstance(where, slice):
        return np.arange(where.start, where.stop, dtype=np.int64)
    return where


def _check_tile(manifest: Manifest, block: BlockEntry, moved: Digest, old: Digest) -> None:
    """What the tile will be is what the manifest says, before any weight is touched."""
    number = manifest.tile_number(block)
    before = manifest.base_tile_digests[number] if manifest.base is not None else old
    if before.plus(moved) != manifest.tile_digests[number]:
        name = manifest.tensors[block.tensor].name
        raise CommitRefused(
            "DigestMismatch", f"tile {block.tile} of {name} would not become what it should"
        )


def _only(changes: Changes, kept: Indices | None) -> Changes:
    """The changes whose elements are held here."""
    if kept is None:
        return changes
    steps, values = changes.steps, changes.values
    return Changes(
        kept,
        steps[kept] if steps is not None else None,
        values[kept] if values is not None else None,
    )


def _base_of(entry: TensorEntry, block: BlockEntry, live: Live) -> Bits | None:
    """The tile's live bits, for a block that cannot be read without them."""
    if block.codec != Codec.RICE:
        return None
    return live[entry.name].take(_positions(entry, block, None))


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
    """Swap the staged elements in; all or nothing. Takes as long as there are changes.

    Only between two iterations. Every element is read back from where it was written; that nothing
    else has changed is for ``confirm``, which reads whole tensors beside the serving engine.

    Returns:
        The digest of the whole state.

    Raises:
        CommitRefused: ``DigestMismatch``; the old bits are back and were checked.
        BrokenWeights: they are not; the engine must not compute any more.
    """
    wrong = scatter(update, live)
    faults.at("engine.commit.checked")
    if wrong is None:
        return Digest.parse(update.manifest.digest)
    revert(update, live, wrong)
    raise CommitRefused("DigestMismatch", f"{update.version}: {wrong}; the old weights are back")


def scatter(update: StagedUpdate, live: Live) -> str | None:
    """Overwrite every staged element and read it back; again does no harm.

    Returns:
        The first tensor that did not keep what was written, None = all did.
    """
    faults.at("engine.commit.begin")
    wrong = None
    for change in update.changes:
        tensor = live[change.tensor.name]
        tensor.put(change.where, change.new)
        if wrong is None and not np.array_equal(tensor.take(change.where), change.new):
            wrong = f"{change.tensor.name} did not keep what was written"
        faults.at("engine.commit.scatter")
    return wrong


def confirm(update: StagedUpdate, live: Live) -> str | None:
    """Recompute the digests of the touched tensors on the live weights; nobody writes meanwhile.

    Whole tensors are read, in one run each: that covers their untouched tiles too, and is much
    faster than tiles that are cut along columns.

    Returns:
        The first tensor that is not what the manifest says, None = all are.
    """
    names = touched(update.manifest)
    return first_wrong(update, {name: live[name].digest() for name in names})


def revert(update: StagedUpdate, live: Live, wrong: str) -> None:
    """Put the old bits back and check the whole state.

    Raises:
        BrokenWeights: it is not what it was.
    """
    put_back(update, live)
    left = digest_live(live)
    if left != update.current:
        raise BrokenWeights(
            f"{update.version}: {wrong}; after the undo the weights have digest {left} instead of "
            f"{update.current}"
        )


def put_back(update: StagedUpdate, live: Live) -> None:
    """Undo ``scatter``; again does no harm."""
    for change in update.changes:
        live[change.tensor.name].put(change.where, change.old)


def touched(manifest: Manifest) -> list[str]:
    """Names of the tensors that a manifest has blocks for, in its order, each once."""
    return list(dict.fromkeys(manifest.tensors[block.tensor].name for block in manifest.blocks))


def first_wrong(update: StagedUpdate, found: Mapping[str, Digest]) -> str | None:
    """The first touched tensor whose live digest is not the sum of the manifest's tile digests."""
    manifest = update.manifest
    table = {entry.name: entry for entry in manifest.tensors}
    for name, digest in found.items():
        entry = table[name]
        end = entry.first_tile + entry.tiling.count
        wanted = total(manifest.tile_digests[entry.first_tile : end])
        if digest != wanted:
            return f"{name} has digest {digest} instead of {wanted}"
    return None
