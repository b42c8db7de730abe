"""The digest of ``device_digest`` as one Triton kernel: elements are read once, sums are written.

Torch's operations write five temporary words for each element, which takes a GPU many times the
weights' own traffic. Loaded where a tensor lies on a CUDA device and Triton is there; the golden
vectors hold it to the host's digests, through Triton's interpreter where there is no GPU.
"""

# Triton's decorators and the functions under them have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rose_core.delta import loops

BLOCK = 4096
"""Elements that a program reads at once: 8 KiB of BF16, 16 to a thread of eight warps."""
PROGRAMS = 4096
"""At most so many at once: several waves on 132 multiprocessors, and 64 KiB of sums."""
WARPS = 8


def _constant(value: int) -> tl.constexpr:
    """A 64-bit word as Triton's signed integers write it."""
    return tl.constexpr(value - (1 << 64) if value >> 63 else value)


GOLDEN = _constant(int(loops.GOLDEN))
MIX1 = _constant(int(loops.MIX1))
MIX2 = _constant(int(loops.MIX2))
MIX3 = _constant(int(loops.MIX3))


@triton.jit
def _fold(words, places: tl.constexpr):
    """``words ^= words >> places``, the shift filling with zeros."""
    return words ^ ((words >> places) & ((1 << (64 - places)) - 1))


# Not specialised: a value of 1 or a multiple of 16 would compile the kernel anew for every tensor.
# Typed, so that one beyond 32 bits does not either: one kernel per width and alignment is left, and
# an image can hold them all (``bake``).
@triton.jit(
    do_not_specialize=["first", "source_stride", "row_stride", "columns", "count", "key", "blocks"]
)
def _sum_lanes(
    bits,
    sums,
    first: tl.int64,
    source_stride: tl.int64,
    row_stride: tl.int64,
    columns: tl.int64,
    count: tl.int64,
    key: tl.int64,
    blocks: tl.int64,
    mask: tl.constexpr,
    size: tl.constexpr,
):
    """Lanes of the elements of every ``num_programs``-th block, into this program's two sums."""
    program = tl.program_id(0).to(tl.int64)
    low = tl.zeros([size], tl.int64)
    high = tl.zeros([size], tl.int64)
    at = program * size + tl.arange(0, size)
    for _ in range(blocks):
        inside = at < count
        row = at // columns
        column = at - row * columns
        values = tl.load(bits + row * row_stride + column, mask=inside, other=0).to(tl.int64) & mask
        mixed = (first + row * source_stride + column + 1) * GOLDEN + key
        mixed = _fold(mixed, 30) * MIX1
        mixed = _fold(mixed, 27) * MIX2
        mixed = _fold(mixed, 31)
        # An element outside has the value 0 and adds nothing to either lane.
        low += (mixed | 1) * values
        mixed = _fold(_fold(mixed, 32) * MIX3, 32)
        high += (mixed | 1) * values
        at += tl.num_programs(0) * size
    tl.store(sums + 2 * program, tl.sum(low, 0))
    tl.store(sums + 2 * program + 1, tl.sum(high, 0))


def lanes(rows: torch.Tensor, first: int, stride: int, key: int) -> torch.Tensor:
    """Both lanes of a matrix of bits, modulo 2^64.

    Args:
        rows: signed integers of the elements' width, shape (rows, columns), unit stride in a row.
        first: flat index of the first element in its tensor.
        stride: from one row to the next in that tensor.
        key: of the tensor, as a signed word.

    Returns:
        Two int64 on the rows' device; the caller decides when to wait for them.
    """
    count, columns = rows.numel(), max(rows.shape[1], 1)
    blocks = triton.cdiv(count, BLOCK)
    programs = max(1, min(blocks, PROGRAMS))
    sums = torch.zeros((programs, 2), dtype=torch.int64, device=rows.device)
    if count:
        bits = rows.element_size() * 8
        mask = -1 if bits == 64 else (1 << bits) - 1
        launch: Any = _sum_lanes[programs,]
        # A launch goes to the current device, which need not be the tensor's.
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            launch(
                rows, sums, first, stride, rows.stride(0), columns, count, key,
                triton.cdiv(blocks, programs), mask, BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return sums.sum(0)
