"""Where a rank's part of a checkpoint tensor lies, as boxes, and the tensor made of them.

A loader copies rectangles: rows of a fused parameter, columns of a row-parallel one, one expert of
a stack, the vocabulary without its padding, a matrix transposed. Each such copy is a ``Box``:
``rows`` x ``columns`` elements whose rows lie ``source_stride`` apart in the flat checkpoint tensor
and ``target_stride`` apart in the flat live parameter. ``SlicedTensor`` answers for the elements
that its boxes hold and for no other. Next step: ``rose_engines.tensors.layout`` watches the
engine's loader and writes the boxes down; ``rose_engines.weights.live`` stages and commits through
them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from rose_core.delta.bits import Bits, Indices
from rose_core.delta.digest import Digest, digest_at, digest_run, total
from rose_core.delta.tiles import TileBox
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.canonical import STALE, Where

# Positions that are made at once when a digest needs them one by one.
_CHUNK = 1 << 20


class Box(msgspec.Struct, frozen=True, array_like=True):
    """One rectangle of a checkpoint tensor inside a live parameter.

    Attributes:
        parameter: the engine's name.
        first: flat index of its first element in the checkpoint tensor.
        rows, columns: its size; a row is contiguous in the checkpoint tensor.
        source_stride: from one row to the next in the checkpoint tensor.
        target_first, target_stride: the same in the flat parameter.
        target_step: from one element of a row to the next in the parameter; above 1 where the
            engine transposes.
    """

    parameter: str
    first: int
    rows: int
    columns: int
    source_stride: int
    target_first: int
    target_stride: int
    target_step: int = 1

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Behind its last element, in the checkpoint tensor."""
        return self.first + (self.rows - 1) * self.source_stride + self.columns

    @property
    def source(self) -> tuple[int, int, int, int]:
        """Which canonical elements it holds; equal for ranks that hold the same ones."""
        return self.first, self.rows, self.columns, self.source_stride

    @property
    def target_end(self) -> int:
        """Behind its last element, in the parameter."""
        across = (self.columns - 1) * self.target_step
        return self.target_first + (self.rows - 1) * self.target_stride + across + 1


class Storage(Protocol):
    """A live parameter, flat: ``HostTensor`` or what lies on an accelerator."""

    @property
    def current(self) -> Callable[[], bool]:
        """Whether what the engine keeps that is made of it follows it."""
        ...

    def take(self, where: Where) -> Bits:
        """A copy of these elements, in host memory."""
        ...

    def put(self, where: Where, bits: Bits) -> None:
        """Overwrite these elements."""
        ...

    def holds(self, where: Where, bits: Bits) -> bool:
        """Whether these elements are these bits."""
        ...

    def span(self, first: int, end: int) -> Bits:
        """A run of elements in host memory: a view where possible, else a copy."""
        ...


@runtime_checkable
class DigestingStorage(Protocol):
    """A storage that computes digests where it lies."""

    def digest_box(self, name: str, box: Box) -> Digest:
        """Digest of a box of the canonical tensor ``name``."""
        ...


def boxes_of(
    parameter: str,
    shape: Sequence[int],
    source: tuple[int, Sequence[int]],
    target: tuple[int, Sequence[int]],
) -> Iterator[Box]:
    """The boxes of one strided copy.

    Args:
        parameter: the engine's name of the target.
        shape: of both sides.
        source: first element and strides in the checkpoint tensor.
        target: the same in the parameter.

    Raises:
        UnsupportedEngine: what is copied lies spread in the checkpoint tensor, or is repeated.
    """
    dims = _merged(shape, source[1], target[1])
    if len(dims) > 2:
        length, apart, moved = dims[0]
        for number in range(length):
            yield from boxes_of(
                parameter,
                [one[0] for one in dims[1:]],
                (source[0] + number * apart, [one[1] for one in dims[1:]]),
                (target[0] + number * moved, [one[2] for one in dims[1:]]),
            )
        return
    (rows, source_stride, target_stride), (columns, inner, step) = [(1, 0, 0), *dims][-2:]
    if inner != 1 or (rows > 1 and source_stride < columns):
        raise UnsupportedEngine(
            f"the engine spreads or repeats what it loads into {parameter!r}; only rectangles "
            f"whose rows are contiguous in the checkpoint are supported"
        )
    if rows == 1:
        source_stride, target_stride = columns, columns * step
    yield Box(parameter, source[0], rows, columns, source_stride, target[0], target_stride, step)


def _merged(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(length, source stride, target stride) of every dimension that is one, adjacent ones joined.

    In the order of the checkpoint, whatever order the engine copies in. At least one dimension is
    left, so that a single element is a row of one.
    """
    dims: list[tuple[int, int, int]] = []
    found = zip(shape, source, target, strict=True)
    for length, apart, moved in sorted(found, key=lambda one: one[1], reverse=True):
        if length == 1:
            continue
        if dims and (dims[-1][1], dims[-1][2]) == (length * apart, length * moved):
            dims[-1] = (dims[-1][0] * length, apart, moved)
        else:
            dims.append((length, apart, moved))
    return dims or [(1, 1, 1)]


@dataclass
class SlicedTensor:
    """The part of one checkpoint tensor that this rank holds.

    Attributes:
        shape: of the whole checkpoint tensor.
        boxes: disjoint, in one parameter.
        storage: that parameter, flat.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    storage: Storage

    @functools.cached_property
    def _table(self) -> npt.NDArray[np.int64]:
        """The numbers of every box, a column each, by where it begins in the checkpoint tensor."""
        boxes = sorted(self.boxes, key=lambda box: box.first)
        numbers = [msgspec.structs.astuple(box)[1:] for box in boxes]
        return np.array(numbers, np.int64).reshape(len(boxes), 7).T

    @functools.cached_property
    def _in_turn(self) -> bool:
        """Whether each box ends in the checkpoint tensor before the next begins."""
        boxes = sorted(self.boxes, key=lambda box: box.first)
        apart = all(one.end <= next_.first for one, next_ in itertools.pairwise(boxes))
        return bool(boxes) and apart

    def own(self, where: Where) -> tuple[Where, Indices | None]:
        """Positions in the parameter of those elements that are held here, and which they are."""
        wanted = _positions(where)
        table = self._table
        if self._in_turn:  # a stack of many experts is looked through once, not once per expert
            number = np.searchsorted(table[0], wanted, side="right") - 1
            found = _places(table[:, np.maximum(number, 0)], wanted)
        else:
            found = np.full(wanted.shape, -1, np.int64)
            for box in table.T:
                found = np.maximum(found, _places(box, wanted))
        kept = np.flatnonzero(found >= 0)
        return (found, None) if len(kept) == len(wanted) else (found[kept], kept)

    def touches(self, tile: TileBox, columns: int) -> bool:
        """Whether a tile of the tensor, seen as a matrix of so many columns, may have a part here.

        May say yes for a tile that has none, never no for one that has.
        """
        first = tile.row0 * columns + tile.column0
        end = (tile.row1 - 1) * columns + tile.column1
        return any(_meets(box, first, end, tile, columns) for box in self.boxes)

    def take(self, where: Where) -> Bits:
        """A copy of elements at positions that ``own`` gave."""
        return self.storage.take(where)

    def put(self, where: Where, bits: Bits) -> None:
        """Overwrite elements at positions that ``own`` gave."""
        self.storage.put(where, bits)

    def holds(self, where: Where, bits: Bits) -> bool:
        """Whether elements at positions that ``own`` gave are these bits."""
        return self.storage.holds(where, bits)

    def all_bits(self) -> Bits:
        """Every element held here, box by box."""
        parts = [self._rows(box).reshape(-1) for box in self.boxes]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def digest(self) -> Digest:
        """Digest of the elements held here."""
        found = total(self._digest_box(box) for box in self.boxes)
        return found if self.storage.current() else found.plus(STALE)

    def _digest_box(self, box: Box) -> Digest:
        if isinstance(self.storage, DigestingStorage):
            return self.storage.digest_box(self.name, box)
        rows = self._rows(box)
        if box.rows == 1:
            return digest_run(self.name, box.first, np.ascontiguousarray(rows[0]))
        step = max(1, _CHUNK // box.columns)
        return total(
            digest_at(
                self.name,
                _indices(box, row, step),
                np.ascontiguousarray(rows[row : row + step]).reshape(-1),
            )
            for row in range(0, box.rows, step)
        )

    def _rows(self, box: Box) -> Bits:
        """The box as a matrix: a view where the parameter is in host memory."""
        span = self.storage.span(box.target_first, box.target_end)
        return np.lib.stride_tricks.as_strided(
            span,
            (box.rows, box.columns),
            (box.target_stride * span.strides[0], box.target_step * span.strides[0]),
            writeable=False,
        )


def _places(box: npt.NDArray[np.int64], wanted: Indices) -> Indices:
    """Where elements lie in the parameter, -1 = not in the box; one box, or one per element."""
    first, rows, columns, source_stride, target_first, target_stride, target_step = box
    row, column = np.divmod(wanted - first, source_stride)
    inside = (row >= 0) & (row < rows) & (column < columns)
    return np.where(inside, target_first + row * target_stride + column * target_step, -1)


def _positions(where: Where) -> Indices:
    if isinstance(where, slice):
        return np.arange(where.start, where.stop, dtype=np.int64)
    return where


def _meets(box: Box, first: int, end: int, tile: TileBox, columns: int) -> bool:
    if box.end <= first or end <= box.first:
        return False
    if box.rows == 1 or box.source_stride != columns:
        return True
    left = box.first % columns
    return left < tile.column1 and tile.column0 < left + box.columns


def _indices(box: Box, row: int, count: int) -> npt.NDArray[np.int64]:
    rows = np.arange(row, min(row + count, box.rows), dtype=np.int64)[:, None]
    return (box.first + rows * box.source_stride + np.arange(box.columns)).reshape(-1)
