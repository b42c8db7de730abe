"""A bundle read, checked and decoded, as far as that needs no live weights.

weight-sync has put a bundle into a folder: ``manifest.msgpack`` and ``blocks/``. Blocks are read,
checked against their names, decoded, and their elements looked up in what an engine process holds:
places, and new bits or steps, go into a segment. It runs in the stager, a process of its own, so
that the engine's thread never waits for its interpreter. Blocks of one tensor are decoded together,
since a block of a small change takes less time than the calls around it.

Next step: ``stager`` hands the segment over, ``staging`` makes an update of it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from rose_core.delta import faults
from rose_core.delta.batch import decode_batch
from rose_core.delta.bits import Bits, Indices
from rose_core.delta.codec import Codec, TileChanges, check_block, decode_block
from rose_core.delta.digest import NOTHING, total
from rose_core.delta.errors import BlockError, ManifestError
from rose_core.delta.loops import RUN, STEPS, VALUES
from rose_core.delta.manifest import BlockEntry, Manifest, TensorEntry
from rose_core.delta.tiles import TileBox as Tile
from rose_core.delta.tiles import Tiling
from rose_core.identity import WeightVersion
from rose_engines.errors import CommitRefused
from rose_engines.tensors.canonical import HostTensor, Live, Where
from rose_engines.tensors.slices import Box, SlicedTensor
from rose_engines.weights.segment import RAW, RAW_HEAD, WIDTHS, Room, Sizes, StagedSegment

MOST_TOGETHER = 1 << 16
"""Changes that are decoded at once: their working memory still fits a core's cache."""

ALONE = 1 << 13
"""A block of so many changes is decoded by itself: the calls around it weigh little by then, and
laying streams end to end costs a quarter more per change than it saves."""

_SPAN = 1 << 32


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


class BlockFolder:
    """The blocks of a bundle, read by their names inside an open folder: a path costs as much.

    Args:
        descriptor: of the folder; None = it is not there.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[BlockFolder]:
        """The folder, for a while; a bundle without changes may have none."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            yield cls(None)
            return
        try:
            yield cls(descriptor)
        finally:
            os.close(descriptor)

    def read(self, block: BlockEntry) -> bytes:
        """A block's bytes, unchecked.

        Raises:
            OSError: it is not there.
        """
        if self._descriptor is None:
            raise FileNotFoundError(block.sha256.hex())
        file = os.open(block.sha256.hex(), os.O_RDONLY, dir_fd=self._descriptor)
        try:
            return os.read(file, block.size + 1)  # one more: what is too long shows in its hash
        finally:
            os.close(file)


class HeldTensor(msgspec.Struct, frozen=True, array_like=True):
    """What an engine process holds of a checkpoint tensor.

    Attributes:
        name, dtype, shape: of the whole tensor.
        boxes: the parts that are here, None = all of it, in the checkpoint's order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...] | None = None


def held_of(live: Live) -> tuple[HeldTensor, ...]:
    """What a process holds; rows count tensors in this order."""
    return tuple(
        HeldTensor(
            one.name,
            one.dtype,
            tuple(one.shape),
            one.boxes if isinstance(one, SlicedTensor) else None,
        )
        for one in live.values()
    )


class Outline(msgspec.Struct, frozen=True):
    """What an engine has to know of a manifest.

    Attributes:
        target: the version that it makes.
        base: there is a base.
        base_digest, digest: of the whole state, before and after; empty without a base.
        changes: elements given, on all ranks.
    """

    target: WeightVersion
    base: bool
    base_digest: str
    digest: str
    changes: int


class Touching(Protocol):
    """Says whether a tile has a part here."""

    def touches(self, tile: Tile, columns: int) -> bool:
        """Whether it may."""
        ...


@dataclass(frozen=True)
class Decoded:
    """A bundle, decoded."""

    outline: Outline
    segment: StagedSegment


class _Part(NamedTuple):
    number: int
    entry: TensorEntry
    tensor: SlicedTensor | None
    blocks: list[BlockEntry]


class Decoder:
    """Decodes bundles for one engine process.

    Args:
        held: what that holds.
    """

    def __init__(self, held: Sequence[HeldTensor]) -> None:
        self._held = {one.name: (number, one) for number, one in enumerate(held)}
        self._parts = {
            one.name: SlicedTensor(
                one.name,
                one.dtype,
                one.shape,
                one.boxes,
                HostTensor(one.name, one.dtype, (0,), _NO_BITS),
            )
            for one in held
            if one.boxes is not None
        }

    def decode(
        self, bundle: Path, current: str, room: Room, rest: Callable[[], None]
    ) -> tuple[Outline, Sizes, StagedSegment]:
        """Read, check and decode a bundle.

        Args:
            bundle: folder with ``manifest.msgpack`` and ``blocks/<sha256 hex>``.
            current: digest of the live weights.
            room: makes the memory that the segment lies in.
            rest: called after every group of blocks; may take its time.

        Raises:
            CommitRefused: ``Layout``, ``WrongBase`` or ``Corrupt``.
            OSError: there is no room.
        """
        manifest = read_manifest(bundle)
        self._check_layout(manifest)
        if manifest.base is not None and manifest.base_digest != current:
            raise CommitRefused(
                "WrongBase",
                f"{manifest.target} starts from {manifest.base} with digest "
                f"{manifest.base_digest}; the engine holds {current}",
            )
        _check_untouched(manifest)
        parts = [self._part(entry, blocks) for entry, blocks in manifest.blocks_by_tensor()]
        sizes = _sizes(parts)
        segment = StagedSegment.over(room(sizes.nbytes), sizes)
        writer = _Writer(manifest, segment)
        with BlockFolder.opened(bundle / "blocks") as folder:
            for place, part in enumerate(parts):
                writer.touch(place, part)
                for group in groups(part.blocks):
                    writer.add(part, group, _read(folder, part.entry, group))
                    rest()
        outline = Outline(
            manifest.target,
            manifest.base is not None,
            manifest.base_digest,
            manifest.digest,
            manifest.changes,
        )
        return outline, sizes, segment

    def _part(self, entry: TensorEntry, blocks: list[BlockEntry]) -> _Part:
        number, _ = self._held[entry.name]
        tensor = self._parts.get(entry.name)
        return _Part(number, entry, tensor, touching(entry, blocks, tensor))

    def _check_layout(self, manifest: Manifest) -> None:
        """Refuse a model that is not the engine's, naming the first difference."""
        table = {entry.name: entry for entry in manifest.tensors}
        missing = sorted(table.keys() ^ self._held.keys())
        if missing:
            owner = "the bundle" if missing[0] in table else "the engine"
            raise CommitRefused(
                "Layout", f"only {owner} has tensor {missing[0]!r} ({len(missing)} such names)"
            )
        for name, entry in table.items():
            _, held = self._held[name]
            if (entry.dtype, tuple(entry.shape)) != (held.dtype, tuple(held.shape)):
                raise CommitRefused(
                    "Layout",
                    f"tensor {name!r} is {entry.dtype}{list(entry.shape)} in the bundle and "
                    f"{held.dtype}{list(held.shape)} in the engine",
                )


_NO_BITS = np.zeros(0, np.uint8)


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


def touching(
    entry: TensorEntry, blocks: Sequence[BlockEntry], tensor: Touching | None
) -> list[BlockEntry]:
    """Those blocks of a tensor that may have a part here; others are another rank's."""
    if tensor is None:
        return list(blocks)
    cut = entry.tiling
    return [block for block in blocks if tensor.touches(cut.box(block.tile), cut.columns)]


def groups(blocks: Sequence[BlockEntry]) -> Iterator[list[BlockEntry]]:
    """Blocks of a tensor that are decoded together: small ``STEPS`` blocks; others are alone."""
    group, held = list[BlockEntry](), 0
    for block in blocks:
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


def _given(cut: Tiling, block: BlockEntry) -> int:
    """How many elements a block gives."""
    if block.codec in {Codec.STEPS, Codec.RICE}:
        return block.changes
    return cut.box(block.tile).elements


def _sizes(parts: Sequence[_Part]) -> Sizes:
    """Room for all that these blocks give: of parts of tensors, more than is here."""
    rows = raw = places = names = 0
    given = dict.fromkeys(WIDTHS, 0)
    for part in parts:
        cut = part.entry.tiling
        rows += len(part.blocks)
        for block in part.blocks:
            count = _given(cut, block)
            given[part.entry.kind.width] += count
            dense = block.codec in {Codec.RAW, Codec.PLANES}
            places += count if part.tensor is not None or not dense else 0
            names += count if part.tensor is not None else 0
            raw += RAW_HEAD.size + block.size if block.codec == Codec.RICE else 0
    one, two, four, eight = given.values()
    return Sizes(rows, len(parts), raw, places, names, (one, two, four, eight))


def _read(folder: BlockFolder, entry: TensorEntry, group: list[BlockEntry]) -> list[bytes]:
    try:
        read = []
        for block in group:
            data = folder.read(block)
            check_block(data, block.sha256)
            read.append(data)
            faults.at("engine.stage.tile")
    except OSError as error:
        raise CommitRefused("Corrupt", f"a block of {entry.name} is missing") from error
    except BlockError as error:
        raise CommitRefused("Corrupt", f"{entry.name}: {error}") from error
    return read


@dataclass
class _Writer:
    """Writes what blocks give into a segment, one behind the other."""

    manifest: Manifest
    segment: StagedSegment
    row: int = 0
    raw: int = 0
    places: int = 0
    names: int = 0
    entries: dict[int, int] = field(default_factory=lambda: dict.fromkeys(WIDTHS, 0))

    def touch(self, place: int, part: _Part) -> None:
        """Note what a tensor's digest will be."""
        entry = part.entry
        end = entry.first_tile + entry.tiling.count
        self.segment.touched[place] = part.number
        self.segment.totals[place] = total(self.manifest.tile_digests[entry.first_tile : end])

    def add(self, part: _Part, group: list[BlockEntry], read: list[bytes]) -> None:
        """What blocks of one tensor that are decoded together do.

        Raises:
            CommitRefused: ``Corrupt``.
        """
        try:
            self._add(part, group, read)
        except BlockError as error:
            raise CommitRefused("Corrupt", f"{part.entry.name}: {error}") from error

    def _add(self, part: _Part, group: list[BlockEntry], read: list[bytes]) -> None:
        entry, cut, first = part.entry, part.entry.tiling, group[0]
        if first.codec == Codec.RICE:
            self._later(part, first, read[0])
        elif first.codec == Codec.STEPS:
            if len(group) > 1:
                batch = decode_batch(read, [block.tile for block in group], cut, entry.kind)
                positions, steps, ends = batch.positions, batch.steps, batch.ends
            else:
                found = decode_block(read[0], entry.kind, cut.box(first.tile).elements)
                positions, steps = _sparse(cut, first.tile, found)
                ends = (len(steps),)
            _check_counts(group, ends)
            self._spread(part, group, positions, steps, ends, STEPS)
        else:
            values = decode_block(read[0], entry.kind, cut.box(first.tile).elements).values
            if values is None:
                message = "a block gives steps where its entry says values"
                raise BlockError(message)
            if part.tensor is None:
                self._lines(part, first, values)
            else:
                every = cut.flat(first.tile, np.arange(len(values), dtype=np.int64))
                self._spread(part, group, every, values, (len(values),), VALUES)

    def _lines(self, part: _Part, block: BlockEntry, values: Bits) -> None:
        """Every element of a tile of a tensor that is here whole."""
        cut = part.entry.tiling
        box = cut.box(block.tile)
        lines = (box.row0 * cut.columns + box.column0, box.column1 - box.column0, cut.columns)
        entry = self._room(part, len(values))
        self.segment.given[part.entry.kind.width][entry : entry + len(values)] = values
        self._note(part, block, (entry, len(values), RUN, RUN, *lines, VALUES, 1))

    def _later(self, part: _Part, block: BlockEntry, data: bytes) -> None:
        """A block that is decoded where the live weights are; room is kept for what it gives."""
        cut = part.entry.tiling
        raw = RAW_HEAD.pack(cut.tile_rows, cut.tile_columns) + data
        self.segment.raw[self.raw : self.raw + len(raw)] = np.frombuffer(raw, np.uint8)
        place, name = self.places, self.names if part.tensor is not None else RUN
        entry = self._room(part, block.changes, spread=True)
        self._note(part, block, (entry, block.changes, place, name, self.raw, len(raw), 0, RAW, 1))
        self.raw += len(raw)

    def _spread(  # noqa: PLR0917
        self,
        part: _Part,
        group: Sequence[BlockEntry],
        positions: Indices,
        bits: Bits,
        ends: Sequence[int],
        given: int,
    ) -> None:
        """Elements at positions of a tensor, block by block."""
        where, kept = (positions, None) if part.tensor is None else part.tensor.own(positions)
        if len(group) > 1 and _apart(listed(where)):
            for block, (first, end) in zip(group, itertools.pairwise((0, *ends)), strict=True):
                some = slice(first, end)
                self._spread(part, [block], positions[some], bits[some], (end - first,), given)
            return
        here = ends if kept is None else np.searchsorted(kept, ends).tolist()
        place, name = self.places, self.names if part.tensor is not None else RUN
        entry = self._room(part, here[-1], spread=True)
        only = slice(None) if kept is None else kept
        start = fill(
            self.segment,
            (part.entry.kind.width, entry, place, name),
            (listed(where), positions[only], bits[only]),
        )
        both = zip(
            group, itertools.pairwise((0, *ends)), itertools.pairwise((0, *here)), strict=True
        )
        for block, (first, end), (first_here, end_here) in both:
            count = end_here - first_here
            named = RUN if name < 0 else name + first_here
            whole = int(count == end - first)
            places = (entry + first_here, count, place + first_here, named, start, 0, 0)
            self._note(part, block, (*places, given, whole))

    def _room(self, part: _Part, count: int, *, spread: bool = False) -> int:
        """Where so many elements begin among those given."""
        width = part.entry.kind.width
        first = self.entries[width]
        self.entries[width] += count
        if spread:
            self.places += count
            self.names += count if part.tensor is not None else 0
        return first

    def _note(self, part: _Part, block: BlockEntry, numbers: tuple[int, ...]) -> None:
        manifest, segment = self.manifest, self.segment
        segment.rows[self.row] = (part.number, block.tile, *numbers)
        number = manifest.tile_number(block)
        after = manifest.tile_digests[number]
        before = manifest.base_tile_digests[number] if manifest.base is not None else NOTHING
        segment.wanted[self.row] = [
            np.uint64((one - other) % (1 << 64)) for one, other in zip(after, before, strict=True)
        ]
        self.row += 1


def _sparse(cut: Tiling, tile: int, found: TileChanges) -> tuple[Indices, Bits]:
    if found.indices is None or found.steps is None:
        message = "a block gives values where its entry says steps"
        raise BlockError(message)
    return cut.flat(tile, found.indices), found.steps


def _check_counts(group: Sequence[BlockEntry], ends: Sequence[int]) -> None:
    for block, (first, end) in zip(group, itertools.pairwise((0, *ends)), strict=True):
        if end - first != block.changes:
            message = f"tile {block.tile}: {end - first} changes, its entry says {block.changes}"
            raise BlockError(message)


def listed(where: Where) -> Indices:
    """Places one by one."""
    if isinstance(where, slice):
        return np.arange(where.start, where.stop, dtype=np.int64)
    return where


def _apart(where: Indices) -> bool:
    """Too far to be counted from the first of them."""
    return len(where) > 0 and int(where.max()) - int(where.min()) >= _SPAN


def fill(
    segment: StagedSegment, to: tuple[int, int, int, int], elements: tuple[Indices, Indices, Bits]
) -> int:
    """Write elements into a segment.

    Args:
        segment: it has the room.
        to: width, first among those given, first place, first name or ``RUN``.
        elements: places, canonical positions, and what is given.

    Returns:
        The element that places count from.

    Raises:
        CommitRefused: ``Layout``: they lie too far apart.
    """
    (width, entry, place, name), (where, named, bits) = to, elements
    count = len(where)
    start = int(where.min()) if count else 0
    if _apart(where):
        raise CommitRefused("Layout", f"elements of one tile lie {_SPAN} or more apart")
    np.subtract(where, start, out=segment.places[place : place + count], casting="unsafe")
    if name >= 0:
        segment.names[name : name + count] = named
    segment.given[width][entry : entry + count] = bits
    return start
