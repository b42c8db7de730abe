"""The digest of ``rose_core.delta.digest`` where the weights are, by Triton or torch.

Nothing but two sums leaves the device, so attesting an engine costs its memory's bandwidth a few
times over and not a copy of the model to the host. The same golden vectors hold it to the host's
digests. torch has signed integers only: sums and products wrap as unsigned ones do, a logical
shift is an arithmetic one with the sign's copies masked out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from rose_core.delta import loops
from rose_core.delta.digest import NOTHING, Digest, tensor_key

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 22
"""Elements at a time: five temporary words each, so 160 MiB beside the weights."""

_BITS = 64
_EVERY = (1 << _BITS) - 1


def _signed(value: int) -> int:
    """The same 64 bits as torch writes them."""
    value &= _EVERY
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


_GOLDEN, _MIX1, _MIX2, _MIX3 = (
    _signed(int(word)) for word in (loops.GOLDEN, loops.MIX1, loops.MIX2, loops.MIX3)
)


def digest_run(name: str, first: int, flat: torch.Tensor) -> Digest:
    """Digest of the elements of tensor ``name`` from flat index ``first`` on.

    Args:
        name: of the tensor.
        first: flat index of the first element.
        flat: their bits as integers of the same width, one-dimensional, on any device.
    """
    return digest_rows(name, (first, 0), flat[None, :])


def digest_rows(name: str, source: tuple[int, int], rows: torch.Tensor) -> Digest:
    """Digest of rows that lie apart in their tensor.

    Args:
        name: of the tensor.
        source: flat index of the first element, and from one row to the next.
        rows: their bits, a matrix, in whatever strides.
    """
    return rows_by_key(tensor_key(name), source, rows)


def rows_by_key(key: int, source: tuple[int, int], rows: torch.Tensor) -> Digest:
    """The same for a tensor whose key is known."""
    first, stride = source
    if rows.is_cuda and (kernel := _kernel()) is not None:
        if rows.shape[1] > 1 and rows.stride(1) != 1:
            rows = rows.contiguous()
        low, high = kernel.lanes(rows, first, stride, _signed(key)).tolist()
        return Digest(low & _EVERY, high & _EVERY)
    found = NOTHING
    height, width = max(1, CHUNK // max(rows.shape[1], 1)), min(rows.shape[1], CHUNK)
    for row in range(0, rows.shape[0], height):
        for column in range(0, rows.shape[1], width):
            part = rows[row : row + height, column : column + width]
            found = found.plus(_lanes(part, first + row * stride + column, stride, key))
    return found


@functools.cache
def _kernel() -> ModuleType | None:
    """The same in one kernel, where torch brought Triton with it."""
    try:
        from rose_engines.ondevice import digest_kernel  # noqa: PLC0415  # compiles at import
    except ImportError:
        return None
    return digest_kernel


def _lanes(part: torch.Tensor, first: int, stride: int, key: int) -> Digest:
    import torch  # noqa: PLC0415  # only where an engine or a trainer has loaded it

    across = torch.arange(part.shape[1], device=part.device, dtype=torch.int64)
    down = torch.arange(part.shape[0], device=part.device, dtype=torch.int64)
    positions = (down * stride)[:, None] + across + first
    low, high = (int(lane.sum()) for lane in products(positions, values_of(part), key))
    return Digest(low & _EVERY, high & _EVERY)


def values_of(bits: torch.Tensor) -> torch.Tensor:
    """Bits as the unsigned integers they stand for, 64 bits wide."""
    import torch  # noqa: PLC0415  # as above

    values = bits.to(torch.int64)
    if bits.element_size() * 8 < _BITS:
        values.bitwise_and_((1 << bits.element_size() * 8) - 1)
    return values


def products(positions: torch.Tensor, values: torch.Tensor, key: int) -> Iterator[torch.Tensor]:
    """What single elements add to either lane; ``positions`` is used up.

    Args:
        positions: flat indices in the tensor, 64 bits wide.
        values: of the elements, or by how much they moved.
        key: of the tensor.
    """
    mixed = positions.add_(1).mul_(_GOLDEN).add_(_signed(key))
    _fold(mixed, 30).mul_(_MIX1)
    _fold(mixed, 27).mul_(_MIX2)
    _fold(mixed, 31)
    yield (mixed | 1).mul_(values)
    _fold(mixed, 32).mul_(_MIX3)
    yield _fold(mixed, 32).bitwise_or_(1).mul_(values)


def _fold(words: torch.Tensor, places: int) -> torch.Tensor:
    """``words ^= words >> places``, the shift filling with zeros."""
    shifted = (words >> places).bitwise_and_((1 << (_BITS - places)) - 1)
    return words.bitwise_xor_(shifted)
