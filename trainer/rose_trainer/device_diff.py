"""Compares a model with its state before on the device that holds it; only changes come out.

A tensor is compared a *band* at a time: whole rows of tiles, at most ``CHUNK`` elements where tiles
allow it. What has changed in a band is coded at once where it is no more than ``BATCH`` elements,
else in halves, down to one tile. So the memory that is needed does not depend on the model or on
how much of it changed:

    working_bytes(width) = CHUNK * (1 + 3 * width) + WORKING_BYTES * BATCH

where a band and a tile are no larger than that (the Publisher's tiles are not; else the largest
counts): one byte per element for the comparison, the band cast, and two bands of the state before
that come from the host. Next step: ``ondevice`` walks a model, ``rose_core.delta.found`` takes what
is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rose_core.delta import Digest, FoundTile, NumberFormat, Tiling
from rose_core.delta.bits import Bits
from rose_core.delta.codec import may_be_dense
from rose_core.delta.digest import tensor_key
from rose_core.delta.rice import WIDEST, Ranked, exponent
from rose_engines.ondevice import device_loops
from rose_engines.ondevice.device_loops import here

CHUNK = 1 << 24
BATCH = 1 << 21
WORKING_BYTES = 128
"""Of temporary words, per change that is coded at once."""

_EVERY = (1 << 64) - 1


def working_bytes(width: int) -> int:
    """Device memory beside model and state before, for elements of so many bytes."""
    return CHUNK * (1 + 3 * width) + WORKING_BYTES * BATCH


@dataclass(frozen=True)
class Region:
    """What is compared of a tensor: all of it, or the box that a rank holds.

    Attributes:
        name: of the tensor.
        kind: its format.
        columns: of the whole tensor.
        row0, column0: where the box begins in it.
        cut: how the box is cut, as a matrix of its own.
        tiles: numbers of the box's tiles in the tensor; None = they are the same.
    """

    name: str
    kind: NumberFormat
    columns: int
    row0: int
    column0: int
    cut: Tiling
    tiles: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Band:
    """Rows of a region's matrix that are compared at once, whole rows of tiles."""

    row0: int
    row1: int
    columns: int

    @property
    def span(self) -> slice:
        """Where its elements lie in the region."""
        return slice(self.row0 * self.columns, self.row1 * self.columns)


def bands(cut: Tiling) -> Iterator[Band]:
    """The bands of a region."""
    high = max(1, CHUNK // max(cut.tile_rows * cut.columns, 1)) * cut.tile_rows
    for row0 in range(0, cut.rows, high):
        yield Band(row0, min(row0 + high, cut.rows), cut.columns)


@dataclass(frozen=True)
class DeviceDiff:
    """What a comparison found in a few tiles.

    Attributes:
        where: positions in the band, tile by tile.
        after: new bits, on the device as ``where`` is.
        tiles: what leaves it.
    """

    where: torch.Tensor
    after: torch.Tensor
    tiles: list[FoundTile]


def differences(
    region: Region, band: Band, old: torch.Tensor, new: torch.Tensor, *, ranked: bool = False
) -> Iterator[DeviceDiff]:
    """Compare a band.

    Args:
        region: what it is a band of.
        band: which.
        old: its bits in the base, as signed integers, flat.
        new: its bits now.
        ranked: find exponent classes too, for blocks coded on their base.
    """
    shape = (band.row1 - band.row0, band.columns)
    work = _Work(region, band, old.view(shape), new.view(shape), ranked)
    mask = work.old != work.new
    yield from _halves(work, mask, slice(0, shape[0]), slice(0, shape[1]))


@dataclass(frozen=True)
class _Work:
    region: Region
    band: Band
    old: torch.Tensor
    new: torch.Tensor
    ranked: bool


def _halves(work: _Work, mask: torch.Tensor, rows: slice, columns: slice) -> Iterator[DeviceDiff]:
    part = mask[rows, columns]
    count = int(torch.count_nonzero(part))
    cut = work.region.cut
    if not count:
        return
    if count > BATCH:
        for axis, tile in ((rows, cut.tile_rows), (columns, cut.tile_columns)):
            middle = axis.start + -(-(axis.stop - axis.start) // tile) // 2 * tile
            if axis.start < middle < axis.stop:
                for half in (slice(axis.start, middle), slice(middle, axis.stop)):
                    both = (half, columns) if axis is rows else (rows, half)
                    yield from _halves(work, mask, *both)
                return
    yield _coded(work, part, rows.start, columns.start)


def _coded(work: _Work, mask: torch.Tensor, row0: int, column0: int) -> DeviceDiff:
    cut, region = work.region.cut, work.region
    down, right = torch.nonzero(mask).unbind(1)
    down, right = down + row0, right + column0
    tile, local = _places(cut, work.band, down, right)
    if cut.across > 1:  # found row by row, wanted tile by tile
        order = torch.argsort(tile, stable=True)
        tile, local, down, right = (one[order] for one in (tile, local, down, right))
    before, after = work.old[down, right], work.new[down, right]
    numbers, counts = torch.unique_consecutive(tile, return_counts=True)
    ends = counts.cumsum(0)
    flat = (down + (work.band.row0 + region.row0)) * region.columns + right + region.column0
    lanes = device_loops.moved(flat, before, after, tensor_key(region.name), ends)
    where = down.mul_(work.band.columns).add_(right)
    if region.kind.sign_magnitude:
        steps = device_loops.steps_between(before, after)
    else:
        steps = after - before
    packed = device_loops.pack_tiles(local, steps, ends)
    table = torch.stack([numbers, ends, packed.gap_ends, packed.escape_ends, *lanes]).cpu()
    streams = (here(packed.gaps), here(packed.codes), here(packed.escapes))
    tiles = _tiles(work, table.T.tolist(), streams, (local, steps))
    return DeviceDiff(where, after, tiles)


def _places(
    cut: Tiling, band: Band, down: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of each position's tile in the region, and its place inside."""
    rows = down + band.row0
    under = torch.div(rows, cut.tile_rows, rounding_mode="floor")
    beside = torch.div(right, cut.tile_columns, rounding_mode="floor")
    width = (cut.columns - beside * cut.tile_columns).clamp_(max=cut.tile_columns)
    local = rows.sub_(under * cut.tile_rows).mul_(width)
    local.add_(right).sub_(beside * cut.tile_columns)
    return under.mul_(cut.across).add_(beside), local


def _tiles(
    work: _Work,
    table: list[list[int]],
    streams: tuple[Bits, Bits, Bits],
    found: tuple[torch.Tensor, torch.Tensor],
) -> list[FoundTile]:
    tiles = []
    starts = (0, 0, 0)
    for number, *ends, low, high in table:
        change_end, gap_end, escape_end = ends
        change, gap, escape = starts
        mine = (
            streams[0][gap:gap_end],
            streams[1][change:change_end],
            streams[2][escape:escape_end],
        )
        made = _tile(work, number, mine, Digest(low & _EVERY, high & _EVERY))
        if work.ranked and work.region.kind.width <= WIDEST:
            made = _with_classes(work, number, made, [one[change:change_end] for one in found])
        tiles.append(made)
        starts = (change_end, gap_end, escape_end)
    return tiles


def _tile(work: _Work, number: int, streams: tuple[Bits, Bits, Bits], moved: Digest) -> FoundTile:
    region = work.region
    elements = region.cut.box(number).elements
    plain = sum(stream.nbytes for stream in streams)
    dense = may_be_dense(plain, elements * region.kind.width)
    return FoundTile(
        tile=number if region.tiles is None else region.tiles[number],
        kind=region.kind,
        elements=elements,
        changes=len(streams[1]),
        moved=moved,
        streams=streams,
        bits=here(_of(work, work.new, number)) if dense else None,
    )


def _with_classes(
    work: _Work, number: int, tile: FoundTile, found: list[torch.Tensor]
) -> FoundTile:
    local, steps = found
    shift, mask = exponent(work.region.kind)
    old = _of(work, work.old, number)
    reference = device_loops.largest(old, mask << shift) >> shift
    classes, gaps = device_loops.rank(old, local, shift, mask, reference)
    ranked = Ranked(reference, here(classes), gaps.cpu().numpy())
    return replace(tile, ranked=(ranked, here(steps)))


def _of(work: _Work, bits: torch.Tensor, number: int) -> torch.Tensor:
    """A tile's elements of the band, row-major."""
    box, row0 = work.region.cut.box(number), work.band.row0
    part = bits[box.row0 - row0 : box.row1 - row0, box.column0 : box.column1]
    return part.reshape(-1)
