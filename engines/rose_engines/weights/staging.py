"""What a stager decoded, checked against the live weights, which stay as they are.

What comes out is everything that a commit needs: for every changed element its place in the live
weights, its old and its new bits. Reading, hashing, decompressing and decoding are the stager's
work (``stager``). Here old bits are gathered, new ones made of steps, and the digest of every
touched tile computed, in one pass and, in host memory, by one compiled loop over all tensors: the
engine's own thread runs Python too, and waits whenever staging holds the interpreter.

Next step: ``rose_engines.weights.live`` commits what was staged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rose_core.delta import loops
from rose_core.delta.bits import Bits, number_format
from rose_core.delta.codec import decode_block, step
from rose_core.delta.digest import NOTHING, Digest, digest_at
from rose_core.delta.errors import BlockError
from rose_core.delta.loops import RUN, STEPS
from rose_core.delta.tiles import Tiling, as_matrix
from rose_engines.errors import CommitRefused
from rose_engines.node.pace import Pace
from rose_engines.tensors.canonical import Live, LiveTensor, Where
from rose_engines.tensors.slices import SlicedTensor
from rose_engines.weights.decoding import Decoded, Outline, fill, held_of, listed
from rose_engines.weights.fused_scatter import FusedScatter, fuse
from rose_engines.weights.fused_scatter import StagedScatter as Fused
from rose_engines.weights.host_memory import HostMemory, Rows, Sums
from rose_engines.weights.segment import RAW, RAW_HEAD, WIDTHS, StagedSegment
from rose_engines.weights.stager import InThread, Stager

_LARGEST = 1 << 48
"""Of the numbers in a row: sums of two are far from what an integer holds."""


@dataclass(frozen=True)
class Change:
    """StagedScatter elements of one tensor.

    Attributes:
        where: places in the live tensor.
        old, new: bits before and after, in the order of ``where``.
        moved: what this adds to the digest.
    """

    tensor: LiveTensor
    where: Where
    old: Bits
    new: Bits
    moved: Digest = NOTHING


@dataclass(frozen=True)
class HostChanges:
    """Changes of tensors in plain host memory, ready to be put in between two iterations.

    Attributes:
        memory: those tensors.
        segment: places and new bits.
        rows: by width.
        old: bits before, by width.
    """

    memory: HostMemory
    segment: StagedSegment
    rows: Mapping[int, Rows]
    old: Mapping[int, Bits]

    def put(self) -> str | None:
        """Put the new bits in and read them back; again does no harm.

        Returns:
            A tensor that did not keep what was written, None = all did.
        """
        return self._swap(self.segment.given)

    def put_back(self) -> str | None:
        """Put the old bits in; again does no harm.

        Returns:
            As ``put``.
        """
        return self._swap(self.old)

    def _swap(self, bits: Mapping[int, Bits]) -> str | None:
        found = [
            self.memory.swap(width, rows, self.segment.places, bits[width])
            for width, rows in self.rows.items()
        ]
        self.memory.renew(self.numbers)
        return next((wrong for wrong in found if wrong is not None), None)

    @functools.cached_property
    def numbers(self) -> list[int]:
        """Of the tensors that change."""
        every = [rows[:, loops.TENSOR] for rows in self.rows.values()]
        return [int(one) for one in np.unique(np.concatenate(every))] if every else []


@dataclass(frozen=True)
class StagedUpdate:
    """A bundle ready to be committed; holds the undo log too.

    Attributes:
        outline: what its manifest says.
        current: digest of the live weights it was staged against.
        wanted: digests that touched tensors will have, on all ranks together.
        moved: what it adds to the digest of what is here of them.
        host: changes of tensors in plain host memory.
        fused: changes of tensors on an accelerator, laid out for one launch.
        single: changes of others, which are put in tensor by tensor.
        live: the tensors.
        segment: what the stager found.
        old: bits before, by width.
    """

    outline: Outline
    current: Digest
    wanted: Mapping[str, Digest]
    moved: Mapping[str, Digest]
    host: HostChanges
    fused: FusedScatter | None
    single: tuple[Change, ...]
    live: Live
    segment: StagedSegment
    old: Mapping[int, Bits]

    @property
    def changes(self) -> tuple[Change, ...]:
        """Every change, tensor by tensor; made anew."""
        tensors = list(self.live.values())
        rows = self.segment.rows
        return tuple(
            one
            for number, some in by_tensor(rows[rows[:, loops.COUNT] > 0])
            for one in changes_of(tensors[number], some, self.segment, self.old, self.moved)
        )

    @property
    def version(self) -> str:
        """Label of the version this makes."""
        return str(self.outline.target)

    @property
    def staged_bytes(self) -> int:
        """Memory of positions, old and new bits: of a segment, what a rank's part has filled."""
        fused = self.fused.nbytes if self.fused is not None else 0
        spread = sum(one.where.nbytes for one in self.single if not isinstance(one.where, slice))
        segment, rows = self.segment, self.segment.rows
        counts = rows[:, loops.COUNT]
        widths = np.array([number_format(one.dtype).width for one in self.live.values()], np.int64)
        bits = 2 * int((counts * widths[rows[:, loops.TENSOR]]).sum())
        places = segment.places.itemsize * int(counts[rows[:, loops.PLACE] >= 0].sum())
        names = segment.names.itemsize * int(counts[rows[:, loops.NAME] >= 0].sum())
        tables = rows, segment.wanted, segment.touched, segment.totals, segment.raw
        return fused + spread + bits + places + names + sum(one.nbytes for one in tables)


def stage(  # noqa: PLR0917
    bundle: Path,
    live: Live,
    current: Digest,
    pace: Pace | None = None,
    stager: Stager | None = None,
    memory: HostMemory | None = None,
) -> StagedUpdate:
    """Decode a bundle and check it against the live weights, touching nothing.

    Args:
        bundle: folder with ``manifest.msgpack`` and ``blocks/<sha256 hex>``.
        live: the engine's weights; nobody else writes them meanwhile.
        current: their attested digest.
        pace: rests between pieces of the work.
        stager: decodes; by default this thread.
        memory: what of the weights is in host memory.

    Raises:
        CommitRefused: ``Layout``, ``WrongBase``, ``Corrupt``, ``DigestMismatch``, or ``Aborted``:
            the stager was lost.
    """
    pace = pace or Pace(lambda: False)
    decoded = (stager or InThread(held_of(live))).decode(bundle, str(current), pace)
    return _Staging(live, memory or HostMemory.of(live), decoded, pace).update(current)


def by_tensor(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Rows of each tensor, which lie one behind the other."""
    if not len(rows):
        return
    cuts = np.flatnonzero(np.diff(rows[:, loops.TENSOR])) + 1
    for some in np.split(rows, cuts):
        yield int(some[0, loops.TENSOR]), some


def changes_of(
    tensor: LiveTensor,
    rows: Rows,
    segment: StagedSegment,
    old: Mapping[int, Bits],
    moved: Mapping[str, Digest],
) -> Iterator[Change]:
    """Rows of a tensor: runs one by one, everything else together; the last has what it moves."""
    width = number_format(tensor.dtype).width
    made = list[Change]()
    spread = [row for row in rows if row[loops.PLACE] >= 0]
    lines = [row for row in rows if row[loops.PLACE] < 0]
    for some in [*([one] for one in lines), *([spread] if spread else [])]:
        taken = [_taken(row) for row in some]
        made.append(
            Change(
                tensor,
                _where(some, segment),
                _joined([old[width][one] for one in taken]),
                _joined([segment.given[width][one] for one in taken]),
            )
        )
    last = made.pop()
    yield from made
    yield Change(last.tensor, last.where, last.old, last.new, moved.get(tensor.name, NOTHING))


def _joined(parts: list[Bits]) -> Bits:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _taken(row: Rows) -> slice:
    return slice(int(row[loops.ENTRY]), int(row[loops.ENTRY] + row[loops.COUNT]))


def _where(rows: list[Rows], segment: StagedSegment) -> Where:
    first = rows[0]
    count = int(first[loops.COUNT])
    if first[loops.PLACE] >= 0:
        return _joined([_places(row, segment) for row in rows])
    start, columns = int(first[loops.START]), int(first[loops.COLUMNS])
    if count <= columns or columns == first[loops.APART]:
        return slice(start, start + count)
    down, right = np.divmod(np.arange(count, dtype=np.int64), columns)
    every: Where = start + down * int(first[loops.APART]) + right
    return every


def _places(row: Rows, segment: StagedSegment) -> npt.NDArray[np.int64]:
    first, count = int(row[loops.PLACE]), int(row[loops.COUNT])
    found: npt.NDArray[np.int64] = segment.places[first : first + count] + row[loops.START]
    return found


@dataclass(frozen=True)
class _Staging:
    """One decoded bundle on its way to an update."""

    live: Live
    memory: HostMemory
    decoded: Decoded
    pace: Pace

    @functools.cached_property
    def _tensors(self) -> list[LiveTensor]:
        return list(self.live.values())

    def update(self, current: Digest) -> StagedUpdate:
        segment = self.decoded.segment
        _check_rows(segment, self._tensors)
        for row in np.flatnonzero(segment.rows[:, loops.GIVEN] == RAW):
            self._decode(int(row))
            self.pace.rest()
        rows = segment.rows
        old = {width: np.empty_like(segment.given[width]) for width in WIDTHS}
        sums = np.zeros((len(rows), 4), np.uint64)
        host = dict[int, Rows]()
        widths = np.array([number_format(one.dtype).width for one in self._tensors], np.int64)
        reached = self.memory.here[rows[:, loops.TENSOR]]
        for width in self.memory.arrays:
            chosen = np.flatnonzero(reached & (widths[rows[:, loops.TENSOR]] == width))
            if len(chosen):
                host[width] = np.ascontiguousarray(rows[chosen])
                sums[chosen] = self._resolve(width, host[width], old[width])
        left = np.flatnonzero(~reached)
        for number, some in by_tensor(rows[left]):
            numbers = left[rows[left, loops.TENSOR] == number]
            sums[numbers] = self._resolve_elsewhere(self._tensors[number], some, old)
        self._check(sums)
        moved = self._moved(sums)
        elsewhere = tuple(
            one
            for number, some in by_tensor(rows[left])
            if some[:, loops.COUNT].any()
            for one in changes_of(self._tensors[number], some, segment, old, moved)
        )
        wanted = {
            self._tensors[number].name: Digest(int(low), int(high))
            for number, (low, high) in zip(segment.touched.tolist(), segment.totals, strict=True)
        }
        fused = fuse(
            (Fused(one.tensor.name, one.where, one.new, one.old) for one in elsewhere), self.live
        )
        names = fused.names if fused is not None else frozenset[str]()
        changes = HostChanges(self.memory, segment, host, old)
        return StagedUpdate(
            self.decoded.outline,
            current,
            wanted,
            moved,
            changes,
            fused,
            tuple(one for one in elsewhere if one.tensor.name not in names),
            self.live,
            segment,
            old,
        )

    def _decode(self, number: int) -> None:
        """A block that was coded on its base: steps and places take the room that was kept."""
        segment, row = self.decoded.segment, self.decoded.segment.rows[number]
        tensor = self._tensors[int(row[loops.TENSOR])]
        start = int(row[loops.START])
        data = segment.raw[start : start + int(row[loops.COLUMNS])].tobytes()
        kind, room = number_format(tensor.dtype), int(row[loops.COUNT])
        try:
            cut = Tiling(*as_matrix(tensor.shape), *RAW_HEAD.unpack_from(data))
            elements = cut.box(int(row[loops.TILE])).elements
            every = cut.flat(int(row[loops.TILE]), np.arange(elements, dtype=np.int64))
            places, kept = tensor.own(every)
            base = tensor.take(places) if kept is None else None  # a part of it makes no base
            found = decode_block(data[RAW_HEAD.size :], kind, elements, base=base)
        except BlockError as error:
            raise CommitRefused("Corrupt", f"{tensor.name}: {error}") from error
        if found.indices is None or found.steps is None or len(found.indices) != room:
            raise CommitRefused("Corrupt", f"{tensor.name}: a block gives not what it should")
        to = (kind.width, int(row[loops.ENTRY]), int(row[loops.PLACE]), int(row[loops.NAME]))
        chosen = listed(places)[found.indices]
        row[loops.START] = fill(segment, to, (chosen, every[found.indices], found.steps))
        row[loops.GIVEN] = STEPS

    def _resolve(self, width: int, rows: Rows, old: Bits) -> Sums:
        segment = self.decoded.segment
        given = segment.given[width]
        found = self.memory.resolve(
            width, rows, segment.places, segment.names, given, old, self.pace.rest
        )
        if isinstance(found, int):
            raise _outside(self._tensors[int(rows[found, loops.TENSOR])])
        return found

    def _resolve_elsewhere(
        self, tensor: LiveTensor, rows: Rows, old: Mapping[int, Bits]
    ) -> npt.NDArray[np.uint64]:
        """The same through the tensor: all that is spread in it is taken at once."""
        segment, kind = self.decoded.segment, number_format(tensor.dtype)
        before, given = old[kind.width], segment.given[kind.width]
        spread = [row for row in rows if row[loops.PLACE] >= 0]
        end = _end(tensor)
        if spread:
            bits = tensor.take(_inside(tensor, _where(spread, segment), end))
            first = 0
            for row in spread:
                count = int(row[loops.COUNT])
                before[_taken(row)] = bits[first : first + count]
                first += count
        sums = np.zeros((len(rows), 4), np.uint64)
        for number, row in enumerate(rows):
            taken = _taken(row)
            where = _where([row], segment)
            if row[loops.PLACE] < 0:
                before[taken] = tensor.take(_inside(tensor, where, end))
            if row[loops.GIVEN] == STEPS:
                given[taken] = step(before[taken], given[taken], kind)
            name = int(row[loops.NAME])
            named = listed(where) if name < 0 else segment.names[name : name + len(before[taken])]
            sums[number, :2] = digest_at(tensor.name, named, before[taken])
            sums[number, 2:] = digest_at(tensor.name, named, given[taken])
        self.pace.rest()
        return sums

    def _check(self, sums: npt.NDArray[np.uint64]) -> None:
        """Every tile that is here whole will be what the manifest says."""
        segment = self.decoded.segment
        # The digest is linear: without a base the new bits alone make the tile's digest.
        change = sums[:, 2:] - sums[:, :2] if self.decoded.outline.base else sums[:, 2:]
        whole = segment.rows[:, loops.WHOLE] == 1
        wrong = np.flatnonzero(whole & (change != segment.wanted).any(axis=1))
        if len(wrong):
            row = segment.rows[wrong[0]]
            name = self._tensors[int(row[loops.TENSOR])].name
            raise CommitRefused(
                "DigestMismatch",
                f"tile {row[loops.TILE]} of {name} would not become what it should",
            )

    def _moved(self, sums: npt.NDArray[np.uint64]) -> dict[str, Digest]:
        """What each tensor's digest gains."""
        added = np.zeros((len(self._tensors), 2), np.uint64)
        numbers = self.decoded.segment.rows[:, loops.TENSOR]
        np.add.at(added, numbers, sums[:, 2:] - sums[:, :2])
        return {
            self._tensors[number].name: Digest(int(added[number, 0]), int(added[number, 1]))
            for number in self.decoded.segment.touched.tolist()
        }


def _end(tensor: LiveTensor) -> int:
    """Behind the last place of a tensor."""
    if isinstance(tensor, SlicedTensor):
        return max((box.target_end for box in tensor.boxes), default=0)
    return math.prod(tensor.shape)


def _inside(tensor: LiveTensor, where: Where, end: int) -> Where:
    """These places, none of which is behind the end: a GPU would not refuse it, but fail.

    Raises:
        CommitRefused: ``Corrupt``.
    """
    last = where.stop if isinstance(where, slice) else int(where.max(initial=-1)) + 1
    if last > end:
        raise _outside(tensor)
    return where


def _outside(tensor: LiveTensor) -> CommitRefused:
    return CommitRefused("Corrupt", f"{tensor.name}: an element outside of what is here")


def _check_rows(segment: StagedSegment, tensors: list[LiveTensor]) -> None:
    """Nothing that a segment says leads out of it: it comes from another process.

    Raises:
        CommitRefused: ``Corrupt``.
    """
    rows = segment.rows
    numbers, count = rows[:, loops.TENSOR], rows[:, loops.COUNT]
    right = (numbers >= 0) & (numbers < len(tensors)) & (count >= 0)
    right &= ((rows >= RUN) & (rows < _LARGEST)).all(axis=1)
    right &= np.isin(rows[:, loops.GIVEN], (loops.VALUES, STEPS, RAW))
    touched = segment.touched
    if not right.all() or ((touched < 0) | (touched >= len(tensors))).any():
        raise CommitRefused("Corrupt", "the stager handed over what is no staging")
    widths = [number_format(one.dtype).width for one in tensors]
    entries = np.array([len(segment.given[width]) for width in widths], np.int64)
    parted = np.array([isinstance(one, SlicedTensor) for one in tensors])
    spread, raw = rows[:, loops.PLACE] >= 0, rows[:, loops.GIVEN] == RAW
    named = rows[:, loops.NAME] >= 0
    right = rows[:, loops.ENTRY] + count <= entries[numbers]
    right &= rows[:, loops.ENTRY] >= 0
    right &= ~spread | (rows[:, loops.PLACE] + count <= len(segment.places))
    right &= ~named | (rows[:, loops.NAME] + count <= len(segment.names))
    right &= named == parted[numbers]
    right &= spread | ((rows[:, loops.COLUMNS] > 0) & (rows[:, loops.APART] > 0))
    right &= ~raw | (spread & (rows[:, loops.START] + rows[:, loops.COLUMNS] <= len(segment.raw)))
    right &= rows[:, loops.START] >= 0
    if not right.all():
        raise CommitRefused("Corrupt", "the stager handed over what leads out of its segment")
