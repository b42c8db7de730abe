"""How a tensor is cut into tiles, so that a tensor-parallel rank can take only its slice.

A tensor of shape ``(..., columns)`` is seen as a matrix of rows x columns; a vector is one column.
Tiles are equal boxes in row-major order, smaller only at the far edges. Engines split a linear
layer over output rows, or over input columns where its input is already split (``o_proj``,
``down_proj``); large tensors are cut eight ways along that axis, so ranks of 2, 4 and 8 own whole
tiles. A wrong guess of the axis costs a rank bytes, never correctness: the manifest states the cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rose_core.delta.bits import Bits, Indices

TILE_ELEMENTS = 1 << 20
"""Largest tile; a block of a 1 % change is then about 14 kB."""

SMALLEST_TILE_ELEMENTS = 1 << 14
"""A tensor is not cut into tiles smaller than this: headers would outweigh the changes."""

RANKS = 8

_INPUT_SPLIT = re.compile(r"(o_proj|down_proj|out_proj|dense_4h_to_h|c_proj|\.w2)(\.|$)")


@dataclass(frozen=True)
class TileBox:
    """Rows ``row0 <= row < row1`` and columns ``column0 <= column < column1`` of the matrix."""

    row0: int
    row1: int
    column0: int
    column1: int

    @property
    def elements(self) -> int:
        """Number of elements inside."""
        return (self.row1 - self.row0) * (self.column1 - self.column0)


@dataclass(frozen=True)
class Tiling:
    """The cut of one tensor: a matrix and the size of its tiles."""

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return -(-self.columns // self.tile_columns)

    @property
    def count(self) -> int:
        """Tiles of the tensor."""
        return -(-self.rows // self.tile_rows) * self.across

    def box(self, tile: int) -> TileBox:
        """Where tile number ``tile`` lies."""
        down, right = divmod(tile, self.across)
        row0, column0 = down * self.tile_rows, right * self.tile_columns
        return TileBox(
            row0,
            min(row0 + self.tile_rows, self.rows),
            column0,
            min(column0 + self.tile_columns, self.columns),
        )

    def boxes(self) -> Iterator[TileBox]:
        """Every tile in order."""
        return (self.box(tile) for tile in range(self.count))

    def cut(self, flat: Bits, tile: int) -> Bits:
        """The tile's elements of a flat tensor, row-major and contiguous (a view if it is one)."""
        box = self.box(tile)
        matrix = flat.reshape(self.rows, self.columns)
        part = matrix[box.row0 : box.row1, box.column0 : box.column1]
        return np.ascontiguousarray(part).reshape(-1)

    def flat(self, tile: int, local: Indices) -> Indices:
        """Positions inside the tile as positions inside the tensor."""
        box = self.box(tile)
        width = box.column1 - box.column0
        if width == self.columns:
            return local + box.row0 * self.columns
        down, right = np.divmod(local, width)
        return (down + box.row0) * self.columns + right + box.column0

    def local(self, tile: int, flat: Indices) -> Indices:
        """Those of ascending positions inside the tensor that the tile has, inside the tile."""
        box = self.box(tile)
        ends = np.searchsorted(flat, (box.row0 * self.columns, box.row1 * self.columns))
        rows = flat[ends[0] : ends[1]] - box.row0 * self.columns
        width = box.column1 - box.column0
        if width == self.columns:
            return rows
        down, right = np.divmod(rows, self.columns)
        mine = (right >= box.column0) & (right < box.column1)
        inside: Indices = down[mine] * width + right[mine] - box.column0
        return inside


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor's matrix; a vector or a number is one column."""
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


def tiling(name: str, shape: Sequence[int]) -> Tiling:
    """The cut the Publisher uses for a tensor.

    Args:
        name: Hugging Face name; decides the axis.
        shape: the whole tensor's shape.
    """
    rows, columns = as_matrix(shape)
    elements = max(rows * columns, 1)
    tile_rows, tile_columns = max(rows, 1), max(columns, 1)
    if elements < RANKS * SMALLEST_TILE_ELEMENTS:
        return Tiling(rows, columns, tile_rows, tile_columns)
    if _INPUT_SPLIT.search(name) and columns % RANKS == 0:
        tile_columns = columns // RANKS
    elif rows % RANKS == 0:
        tile_rows = rows // RANKS
    return Tiling(rows, columns, _fewer_rows(tile_rows, tile_columns), tile_columns)


def _fewer_rows(rows: int, columns: int) -> int:
    """A divisor of ``rows`` that makes the tile small enough, so that ranks keep whole tiles."""
    if rows * columns <= TILE_ELEMENTS:
        return rows
    least, most = SMALLEST_TILE_ELEMENTS // columns, 2 * TILE_ELEMENTS // columns
    divisors = {
        part
        for small in range(1, math.isqrt(rows) + 1)
        if rows % small == 0
        for part in (small, rows // small)
    }
    fitting = [part for part in divisors if least <= part <= most]
    return max(fitting, default=max(TILE_ELEMENTS // columns, 1))
