"""A bundle decoded and checked beside the serving engine, touching nothing.

What comes out is everything that a commit needs: for every changed element its place in the live
weights, its old and its new bits. Blocks of one tensor are decoded, gathered and checked together:
the engine's own thread runs Python too, and waits whenever staging holds the interpreter. One call
per tensor instead of thirty per tile is the difference between a stream that notices and one that
does not (``make bench-gap``), and on a device it saves a round trip per tile.

Next step: ``rose_engines.weights.live`` commits what was staged.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rose_core.delta import faults
from rose_core.delta.batch import decode_batch
from rose_core.delta.bits import Bits, Indices
from rose_core.delta.codec import Changes, Codec, check_block, decode_block
from rose_core.delta.digest import NOTHING, Digest, digest_at, digest_change, total
from rose_core.delta.errors import BlockError
from rose_core.delta.manifest import BlockEntry, Manifest, TensorEntry
from rose_engines.errors import CommitRefused
from rose_engines.tensors.canonical import Live, LiveTensor, Where
from rose_engines.weights.bundle import BlockFolder, read_manifest
from rose_engines.weights.fused_scatter import FusedScatter, fuse
from rose_engines.weights.fused_scatter import Staged as Fused

MOST_TOGETHER = 1 << 16
"""Changes that are decoded at once: their working memory still fits a core's cache."""

ALONE = 1 << 13
"""A block of so many changes is decoded by itself: the calls around it weigh little by then, and
laying streams end to end costs a quarter more per change than it saves."""


@dataclass(frozen=True)
class Change:
    """Staged elements of one tensor.

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
        fused: what lies on an accelerator of it, laid out for one launch.
    """

    manifest: Manifest
    current: Digest
    changes: tuple[Change, ...]
    fused: FusedScatter | None = None

    @functools.cached_property
    def single(self) -> tuple[Change, ...]:
        """Changes that are put in tensor by tensor: those in host memory."""
        fused = self.fused.names if self.fused is not None else frozenset[str]()
        return tuple(change for change in self.changes if change.tensor.name not in fused)

    @property
    def version(self) -> str:
        """Label of the version this makes."""
        return str(self.manifest.target)

    @property
    def staged_bytes(self) -> int:
        """Memory of positions, old and new bits."""
        return (self.fused.nbytes if self.fused is not None else 0) + sum(
            change.old.nbytes
            + change.new.nbytes
            + (0 if isinstance(change.where, slice) else change.where.nbytes)
            for change in self.changes
        )


def stage(
    bundle: Path, live: Live, current: Digest, rest: Callable[[], None] = lambda: None
) -> StagedUpdate:
    """Decode a bundle and check it against the live weights, touching nothing.

    Args:
        bundle: folder with ``manifest.msgpack`` and ``blocks/<sha256 hex>``.
        live: the engine's weights; nobody else writes them meanwhile.
        current: their attested digest.
        rest: called after every group of blocks; may take its time.

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
    changes = list[Change]()
    with BlockFolder.opened(bundle / "blocks") as folder:
        stager = _Stager(manifest, folder)
        for entry, blocks in manifest.blocks_by_tensor():
            parts = []
            for group in groups(entry, blocks, live[entry.name]):
                parts.append(stager.stage(entry, group, live[entry.name]))
                rest()
            changes += _joined(parts)
    fused = fuse((Fused(one.tensor.name, one.where, one.new, one.old) for one in changes), live)
    return StagedUpdate(manifest, current, tuple(changes), fused)


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
    before, after = (
        np.frombuffer(table, "<u8").reshape(-1, 2)
        for table in (manifest.base_tiles, manifest.tiles)
    )
    changed = (before != after).any(axis=1)
    changed[[manifest.tile_number(block) for block in manifest.blocks]] = False
    if changed.any():
        number = int(np.flatnonzero(changed)[0])
        raise CommitRefused("Corrupt", f"tile {number} changes but no block says how")


def groups(
    entry: TensorEntry, blocks: list[BlockEntry], tensor: LiveTensor
) -> Iterator[list[BlockEntry]]:
    """Blocks of a tensor that are staged together: small ``STEPS`` blocks; others are alone."""
    cut, group, held = entry.tiling, list[BlockEntry](), 0
    for block in blocks:
        if not tensor.touches(cut.box(block.tile), cut.columns):
            continue  # another rank's
        if block.codec != Codec.STEPS or block.changes >= ALONE:
            yield [block]
            continue
        if group and held + block.changes > MOST_TOGETHER:
            yield group
            group, held = [], 0
        group.append(block)
        held += block.changes
    if group:
        yield group


def _joined(parts: list[Change]) -> list[Change]:
    """Parts of a tensor as one, so that a commit puts it in at once; runs stay as they are."""
    runs = [part for part in parts if isinstance(part.where, slice)]
    spread = [part for part in parts if not isinstance(part.where, slice)]
    if len(spread) < 2:
        return parts
    joined = Change(
        spread[0].tensor,
        np.concatenate([_listed(part.where) for part in spread]),
        np.concatenate([part.old for part in spread]),
        np.concatenate([part.new for part in spread]),
        total(part.moved for part in spread),
    )
    return [*runs, joined]


class _Decoded(NamedTuple):
    """Positions inside the tensor, what happens there, and where each block's part ends."""

    positions: Where
    changes: Changes
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _Stager:
    """Stages groups of blocks of one bundle."""

    manifest: Manifest
    folder: BlockFolder

    def stage(self, entry: TensorEntry, group: list[BlockEntry], tensor: LiveTensor) -> Change:
        """Places, old and new bits of everything that these blocks change here."""
        try:
            positions, changes, ends = self._decode(entry, group, tensor)
        except OSError as error:
            raise CommitRefused("Corrupt", f"a block of {entry.name} is missing") from error
        except BlockError as error:
            raise CommitRefused("Corrupt", f"{entry.name}: {error}") from error
        where, kept = tensor.own(positions)
        old = tensor.take(where)
        new = _only(changes, kept).resolve(old, entry.kind)
        named = _listed(positions)
        if kept is None:
            moved = self._checked(group, ends, named, old, new)
        else:  # the others are another rank's: no tile can be checked before all have swapped
            moved = digest_change(entry.name, named[kept], old, new)
        return Change(entry, where, old, new, moved)

    def _decode(self, entry: TensorEntry, group: list[BlockEntry], tensor: LiveTensor) -> _Decoded:
        read = []
        for block in group:
            data = self.folder.read(block)
            check_block(data, block.sha256)
            read.append(data)
            faults.at("engine.stage.tile")
        first = group[0]
        if len(group) > 1:
            batch = decode_batch(read, [block.tile for block in group], entry.tiling, entry.kind)
            return _Decoded(batch.positions, Changes(steps=batch.steps), batch.ends)
        base = tensor.take(_positions(entry, first, None)) if first.codec == Codec.RICE else None
        elements = entry.tiling.box(first.tile).elements
        found = decode_block(read[0], entry.kind, elements, base=base)
        return _Decoded(_positions(entry, first, found.indices), found, (len(found),))

    def _checked(
        self,
        group: list[BlockEntry],
        ends: tuple[int, ...],
        named: Indices,
        old: Bits,
        new: Bits,
    ) -> Digest:
        """What the group adds to the digest, once every tile will be what the manifest says."""
        manifest = self.manifest
        name = manifest.tensors[group[0].tensor].name
        based = manifest.base is not None
        # The digest is linear: without a base the new bits alone make the tile's digest.
        told = new.astype(np.uint64) - old.astype(np.uint64) if based else new
        parts = []
        for block, (first, end) in zip(group, itertools.pairwise((0, *ends)), strict=True):
            parts.append(digest_at(name, named[first:end], told[first:end]))
            number = manifest.tile_number(block)
            after = manifest.base_tile_digests[number].plus(parts[-1]) if based else parts[-1]
            if after != manifest.tile_digests[number]:
                raise CommitRefused(
                    "DigestMismatch", f"tile {block.tile} of {name} would not become what it should"
                )
        return total(parts) if based else digest_change(name, named, old, new)


def _listed(where: Where) -> Indices:
    if isinstance(where, slice):
        return np.arange(where.start, where.stop, dtype=np.int64)
    return where


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
