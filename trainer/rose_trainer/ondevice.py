"""Snapshots of a model that is compared where it lies: only changes leave the device.

``Base`` is the state that was taken last, in pinned host memory (``keep_on="host"``: it goes to the
device band by band, the next one while this one is compared) or on the devices of the tensors
(``keep_on="device"``: one more copy of the model there, and nothing but changes on the bus).
``take`` compares the tensors with it, keeps what was found as coded streams, and moves the base on;
so a version is told from the one taken before it, and versions go out in the order in which they
were taken. The first one has no base: it is a copy, which leaves in full.

A comparison that breaks off (the device has no memory left) leaves a base that is neither state.
Nothing is published from it any more: a new Publisher begins from the digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from rose_core.delta import (
    Builder,
    FoundTile,
    TensorEntry,
    TensorSpec,
    TileBox,
    Tiling,
    number_format,
    tiling,
)
from rose_core.delta.bits import Bits
from rose_core.delta.parts import PartBuilder, inside
from rose_engines.ondevice.device_loops import SIGNED, here
from rose_engines.ondevice.device_stage import ahead
from rose_trainer.device_diff import Band, DeviceDiff, Region, bands, differences
from rose_trainer.errors import BadState
from rose_trainer.staging import Layout, Tensors, holds_all, pairs, place_of, refuse_shared

if TYPE_CHECKING:  # PyTorch's sharded tensors take as long to import as half of PyTorch
    from rose_trainer.shards import Shard

Place = Literal["host", "device"]
"""Where the state before lies."""

Where = Literal["auto", "host", "device"]
"""Where a state is compared with it; ``auto`` = on the device where all tensors are on CUDA."""

Changed = dict[str, list[FoundTile]]
"""By tensor, the tiles that changed."""


def in_place(compare_on: Where, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are compared where they lie."""
    on_cuda = compare_on == "auto" and all(tensor.is_cuda for tensor in tensors)
    return compare_on == "device" or on_cuda


@dataclass(frozen=True)
class Piece:
    """A tensor, or what a rank holds of it.

    Attributes:
        region: how it is cut.
        tensor: its values.
        dtype: element type it is published in.
    """

    region: Region
    tensor: torch.Tensor
    dtype: torch.dtype


class Base:
    """The state that was taken last, tensor by tensor.

    Args:
        keep_on: where it lies.
    """

    def __init__(self, keep_on: Place = "host") -> None:
        self._keep_on = keep_on
        self._flat: dict[str, torch.Tensor] = {}
        self._torn = False

    def check(self) -> None:
        """Refuse to go on from a base that is no state.

        Raises:
            BadState: it is none.
        """
        if self._torn:
            message = "the state before is lost, a publish broke off; start a new Publisher"
            raise BadState(message)

    def discard(self) -> None:
        """Discard what was taken last: it is published nowhere."""
        self._torn = True

    def take(self, pieces: Sequence[Piece], *, ranked: bool = False) -> Changed:
        """What changed since the last time; the base then is this state.

        Args:
            pieces: of the model, the same every time.
            ranked: find exponent classes too, for blocks coded on their base.
        """
        self._torn = True
        found = self._compare(pieces, ranked) if self._flat else self._fill(pieces)
        self._torn = False
        return found

    def bits(self, name: str) -> Bits:
        """A tensor's bits on the host."""
        return here(self._flat[name])

    def _fill(self, pieces: Sequence[Piece]) -> Changed:
        """Copy a model; returns when all copies are complete."""
        for piece in pieces:
            tensor = piece.tensor
            device = tensor.device if self._keep_on == "device" else torch.device("cpu")
            pin = device.type == "cpu" and tensor.is_cuda
            kept = torch.empty(tensor.numel(), dtype=piece.dtype, device=device, pin_memory=pin)
            kept.copy_(tensor.detach().reshape(-1), non_blocking=True)
            self._flat[piece.region.name] = integers(kept)
        for device in {piece.tensor.device for piece in pieces if piece.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return {}

    def _compare(self, pieces: Sequence[Piece], ranked: bool) -> Changed:
        olds = ahead(
            (self._part(piece.region.name, band), piece.tensor.device)
            for piece in pieces
            for band in bands(piece.region.cut)
        )
        changed: Changed = {}
        for piece in pieces:
            flat, name = piece.tensor.detach().reshape(-1), piece.region.name
            for band in bands(piece.region.cut):
                new = integers(flat[band.span].to(piece.dtype))
                for found in differences(piece.region, band, next(olds), new, ranked=ranked):
                    self._move(name, band, found)
                    changed.setdefault(name, []).extend(found.tiles)
        return changed

    def _part(self, name: str, band: Band) -> torch.Tensor:
        return self._flat[name][band.span]

    def _move(self, name: str, band: Band, found: DeviceDiff) -> None:
        part = self._part(name, band)
        part[found.where.to(part.device)] = found.after.to(part.device)


class DeviceSnapshot:
    """What one ``take`` found; used again and again, as ``staging.Snapshot`` is.

    Args:
        layout: the model's tensors.
        base: the state before; shared by all snapshots of a publisher.
        ranked: find exponent classes too, for blocks coded on their base.
    """

    def __init__(self, layout: Layout, base: Base, *, ranked: bool = False) -> None:
        self.layout = layout
        self._base = base
        self._ranked = ranked
        self._changed: Changed = {}

    def take(self, tensors: Tensors, since: object = None) -> None:
        """Compare every tensor with the base, which then is this state.

        Args:
            tensors: the model's.
            since: not needed; the base is what was taken last.

        Raises:
            BadState: the tensors are not those of the layout, or an earlier ``take`` broke off.
        """
        del since
        self._base.check()
        pieces = [
            Piece(region_of(spec), tensor, self.layout.target(tensor))
            for spec, tensor in _checked(self.layout, tensors)
        ]
        self._changed = self._base.take(pieces, ranked=self._ranked)

    def bits(self, name: str) -> Bits:
        """A tensor's bits on the host, flat; only while this is the state taken last."""
        return self._base.bits(name)

    def add_to(self, builder: Builder, name: str, before: object) -> None:
        """Add a tensor's changes to a manifest in the making."""
        del before
        builder.add_found(self._changed.get(name, []))


class DeviceShards:
    """The same for what a rank holds, as ``shards.ShardSnapshot`` is.

    Args:
        tensors: the tensor table, whose tiles no two ranks share.
        base: the state before.
    """

    def __init__(self, tensors: Sequence[TensorEntry], base: Base) -> None:
        self._tensors = tensors
        self._base = base
        self._changed: Changed = {}

    def take(self, shards: Sequence[Shard]) -> None:
        """Compare every owned box with the base, which then is this state.

        Raises:
            BadState: an earlier publish broke off.
        """
        self._base.check()
        pieces = [
            Piece(region_in(entry, shard.box), shard.local, shard.dtype)
            for entry, shard in zip(self._tensors, shards, strict=True)
            if shard.owned
        ]
        self._changed = self._base.take(pieces)

    def bits(self, name: str) -> Bits:
        """A box's bits, row-major."""
        return self._base.bits(name)

    def add_to(self, builder: PartBuilder, number: int, shard: Shard, before: object) -> None:
        """Add a box to the rank's part, in full where nothing was before."""
        name = shard.spec.name
        if before is None:
            builder.add(number, shard.box, None, self.bits(name))
        else:
            builder.add_found(number, shard.box, self._changed.get(name, []))

    def discard(self) -> None:
        """Discard the version, which was not published: no difference from this state is known."""
        self._base.discard()


def region_of(spec: TensorSpec) -> Region:
    """A whole tensor, cut as the Publisher cuts it."""
    cut = tiling(spec.name, spec.shape)
    return Region(spec.name, number_format(spec.dtype), cut.columns, 0, 0, cut)


def region_in(entry: TensorEntry, box: TileBox) -> Region:
    """A rank's box of a tensor; its tiles are the tensor's."""
    rows, columns = box.row1 - box.row0, box.column1 - box.column0
    cut = Tiling(rows, columns, entry.tile_rows, entry.tile_columns)
    tiles = tuple(inside(entry, box))
    return Region(entry.name, entry.kind, entry.tiling.columns, box.row0, box.column0, cut, tiles)


def integers(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a contiguous tensor as signed integers of its width."""
    return flat.view(SIGNED[flat.element_size()])


def _checked(layout: Layout, tensors: Tensors) -> list[tuple[TensorSpec, torch.Tensor]]:
    """The tensors of the layout without tied ones, before anything is touched."""
    found = []
    alive = list(pairs(tensors))
    if not holds_all(tensors):
        refuse_shared(alive)
    firsts: dict[str, torch.Tensor] = {}
    ties = []
    for name, tensor in alive:
        spec = layout.check(name, tensor)
        if spec is not None:
            found.append((spec, tensor))
            firsts[name] = tensor
        else:
            ties.append((name, tensor))
    missing = {spec.name for spec in layout.specs} - {spec.name for spec, _ in found}
    if missing:
        message = f"{len(missing)} tensors are missing, first {min(missing)}"
        raise BadState(message)
    for name, tensor in ties:
        first = firsts[layout.tied[name]]
        if place_of(tensor) != place_of(first) and not _equal(layout, tensor, first):
            raise layout.parted(name)
    return found


def _equal(layout: Layout, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors would be published with the same bits."""
    if one.shape != other.shape or layout.target(one) != layout.target(other):
        return False
    mine, theirs = (
        integers(tensor.detach().to(layout.target(tensor)).contiguous().reshape(-1))
        for tensor in (one, other)
    )
    return torch.equal(mine, theirs.to(mine.device))
