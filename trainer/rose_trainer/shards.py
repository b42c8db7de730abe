"""Which box of every tensor this rank holds, and snapshots of those boxes.

A ``DTensor``'s shard is a box of the tensor's matrix (``rose_core.delta.tiles``): a shard along the
first dimension is a range of rows, along the last one a range of columns. Placements that are no
box (interleaved shards, partial sums) are refused by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from rose_core.delta import TensorSpec, TileBox
from rose_core.delta.bits import Bits
from rose_core.delta.parts import PartBuilder
from rose_core.delta.tiles import as_matrix
from rose_trainer.errors import BadState
from rose_trainer.staging import DTYPE_NAMES, bits_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# Slow to import, and whoever holds a ``DTensor`` has imported it.
_DTENSORS = "torch.distributed.tensor"


@dataclass(frozen=True)
class Shard:
    """One tensor as this rank sees it.

    Attributes:
        spec: the whole tensor, in the element type it is published in.
        box: what this rank holds of its matrix.
        chunk: rows and columns of a full shard; every boundary is a multiple of them.
        owned: this rank publishes the box (another one may hold a copy).
        local: the bits' tensor, not yet cast.
        dtype: element type it is published in.
    """

    spec: TensorSpec
    box: TileBox
    chunk: tuple[int, int]
    owned: bool
    local: torch.Tensor
    dtype: torch.dtype


class TakenShards(Protocol):
    """What was taken of a rank's boxes, on the host (``ShardSnapshot``) or where they lie."""

    def take(self, shards: Sequence[Shard]) -> None:
        """Take every owned box; returns when the model may change."""

    def bits(self, name: str) -> Bits:
        """A box's bits, row-major."""

    def add_to(
        self, builder: PartBuilder, number: int, shard: Shard, before: TakenShards | None
    ) -> None:
        """Add a box to the rank's part, in full where nothing was before."""

    def discard(self) -> None:
        """Discard the version, which was not published."""


class ShardSnapshot:
    """A copy of this rank's boxes in host memory, used again and again."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, shards: Sequence[Shard]) -> None:
        """Copy every owned box; returns when all copies are complete."""
        devices: set[torch.device] = set()
        for shard in shards:
            if not shard.owned:
                continue
            name = shard.spec.name
            if name not in self._buffers:
                self._buffers[name] = torch.empty(
                    shard.local.shape, dtype=shard.dtype, pin_memory=shard.local.is_cuda
                )
            self._buffers[name].copy_(shard.local, non_blocking=True)
            devices.add(shard.local.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def bits(self, name: str) -> Bits:
        """A box's bits, row-major; a view of the buffer."""
        return bits_of(self._buffers[name])

    def add_to(
        self, builder: PartBuilder, number: int, shard: Shard, before: TakenShards | None
    ) -> None:
        """Add a box to the rank's part; it is compared now."""
        old = None if before is None else before.bits(shard.spec.name)
        builder.add(number, shard.box, old, self.bits(shard.spec.name))

    def discard(self) -> None:
        """Discard the version, which was not published: the state before stays the base."""


def shards_of(
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
    group: dist.ProcessGroup | None,
) -> list[Shard]:
    """This rank's box of every tensor.

    Raises:
        BadState: a tensor or placement that cannot be published; says which and why.
    """
    first = dist.get_rank(group) == 0
    found = []
    for name, tensor in tensors:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        dtype_name = DTYPE_NAMES.get(kind)
        if dtype_name is None or tensor.is_meta or tensor.is_sparse:
            message = (
                f"{name} is {kind}, {tensor.layout}; publishable: {', '.join(DTYPE_NAMES.values())}"
            )
            raise BadState(message)
        spec = TensorSpec(name, dtype_name, tuple(tensor.shape))
        if _is_sharded(tensor):
            found.append(_sharded(spec, tensor, kind))
        else:
            rows, columns = as_matrix(spec.shape)
            box = TileBox(0, rows, 0, columns)
            found.append(Shard(spec, box, (rows, columns), first, tensor.detach(), kind))
    if not found:
        message = "no tensors; pass model.state_dict() or pairs of name and tensor"
        raise BadState(message)
    return found


def _is_sharded(tensor: torch.Tensor) -> TypeIs[DTensor]:
    module = sys.modules.get(_DTENSORS)
    return module is not None and isinstance(tensor, module.DTensor)


def _sharded(spec: TensorSpec, tensor: DTensor, kind: torch.dtype) -> Shard:
    from torch.distributed.tensor import Replicate  # noqa: PLC0415  # see _DTENSORS

    rows, columns = as_matrix(spec.shape)
    spans = {"rows": (0, rows, rows), "columns": (0, columns, columns)}
    place: list[int] = list(tensor.device_mesh.get_coordinate() or [])
    owned = bool(place)
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            owned = owned and place[dimension] == 0
            continue
        axis, unit = _axis(spec, placement)
        whole = rows if axis == "rows" else columns
        if spans[axis] != (0, whole, whole):
            message = f"{spec.name} is sharded twice along one dimension ({tensor.placements})"
            raise BadState(message)
        ranks, mine = tensor.device_mesh.size(dimension), place[dimension] if place else 0
        spans[axis] = _span(whole, unit, ranks, mine)
    (row0, row1, row_chunk), (column0, column1, column_chunk) = spans["rows"], spans["columns"]
    box = TileBox(row0, row1, column0, column1)
    local = tensor.to_local().detach()
    if local.numel() != box.elements:
        message = f"{spec.name}: {tuple(local.shape)} on this rank where {box} was expected"
        raise BadState(message)
    return Shard(spec, box, (row_chunk, column_chunk), owned and box.elements > 0, local, kind)


def _axis(spec: TensorSpec, placement: object) -> tuple[str, int]:
    """Rows or columns of the matrix, and how many of them one index of the dimension is."""
    from torch.distributed.tensor import Shard as Along  # noqa: PLC0415  # see _DTENSORS

    dimensions = len(spec.shape)
    if type(placement) is Along:
        dimension = placement.dim % max(dimensions, 1)
        if dimension == 0:
            return "rows", math.prod(spec.shape[1:-1])
        if dimension == dimensions - 1:
            return "columns", 1
    message = (
        f"{spec.name}{list(spec.shape)} is placed as {placement}; shards along the first or last "
        f"dimension and replicas can be published, else pass full_tensor()"
    )
    raise BadState(message)


def _span(whole: int, unit: int, ranks: int, rank: int) -> tuple[int, int, int]:
    """First and last row (or column) of a rank's shard, and the size of a full one."""
    chunk = -(-(whole // unit) // ranks) * unit
    return min(rank * chunk, whole), min((rank + 1) * chunk, whole), chunk
