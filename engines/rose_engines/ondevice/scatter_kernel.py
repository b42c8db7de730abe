"""One launch that puts a commit's elements into many tensors and reads them back.

A program takes one chunk of an arena: a row of the table says at which address its elements go, so
the number of tensors is nothing to the launch. Arena, table and result lie in pinned host memory,
which the device reads and writes at the same addresses; no memory of it is taken. Triton's
interpreter runs this where there is no GPU, and its assembler translates it for Hopper.
Next step: ``rose_engines.weights.fused_scatter`` lays arenas out.
"""

# Triton's decorators and the functions under them have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

WARPS = 4


@triton.jit
def _scatter_chunks(table, offsets, values, wrong, size: tl.constexpr):
    """Elements of one chunk, in and read back; a chunk that did not keep them says its number."""
    chunk = tl.program_id(0).to(tl.int64)
    row = table + 4 * chunk
    base = tl.load(row)
    first = tl.load(row + 1)
    places = tl.load(row + 2)
    count = tl.load(row + 3)
    lane = tl.arange(0, size)
    inside = lane < count
    given = tl.load(values + first + lane, mask=inside, other=0)
    spread = tl.load(offsets + places + lane, mask=inside & (places >= 0), other=0).to(tl.int64)
    place = tl.where(places >= 0, spread, lane.to(tl.int64))
    target = base.to(tl.pointer_type(values.dtype.element_ty)) + place
    tl.store(target, given, mask=inside)
    # Another thread of the program may have written the same place.
    tl.debug_barrier()
    # Volatile: from memory, not what this thread remembers having written.
    kept = tl.load(target, mask=inside, other=0, volatile=True)
    missed = tl.sum(((kept != given) & inside).to(tl.int32), 0)
    tl.store(wrong, chunk + 1, mask=missed > 0)


def scatter(
    table: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    wrong: torch.Tensor,
    target: torch.Tensor,
    chunk: int,
) -> None:
    """Launch it for an arena; the caller decides when to wait.

    Args:
        table: as ``fused_scatter.Arena`` says.
        offsets: the same.
        values: the same.
        wrong: the same; 0 beforehand.
        target: a tensor on the device that all addresses belong to.
        chunk: elements that one program puts in; the kernel is compiled for it.
    """
    launch: Any = _scatter_chunks[len(table) // 4,]
    # A launch goes to the current device, which need not be the tensors'.
    with torch.cuda.device_of(target):  # type: ignore[no-untyped-call]
        launch(table, offsets, values, wrong, chunk, num_warps=WARPS)
