"""Runs in the environment of the engine: the kernel by Triton's interpreter or for Hopper.

Digests of what stands in the arguments are printed; nothing else is.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rose_core.delta.digest import Digest, tensor_key
from rose_engines.ondevice import digest_kernel

EVERY = (1 << 64) - 1
HOPPER = GPUTarget("cuda", 90, 32)
SIGNATURE = {
    "sums": "*i64", "first": "i64", "source_stride": "i64", "row_stride": "i64",
    "columns": "i64", "count": "i64", "key": "i64", "blocks": "i64",
    "mask": "constexpr", "size": "constexpr",
}  # fmt: skip


def interpret(width: int, first: int, rows: int, columns: int, seed: int) -> Digest:
    """Digest of the first columns of random rows, by the kernel."""
    raw = np.random.default_rng(seed).integers(0, 256, rows * 2 * columns * width, np.uint8)
    whole = torch.from_numpy(raw.view(f"i{width}").reshape(rows, 2 * columns).copy())
    key = tensor_key("t")
    signed = key - (1 << 64) if key >> 63 else key
    low, high = digest_kernel.lanes(whole[:, :columns], first, 2 * columns, signed).tolist()
    return Digest(low & EVERY, high & EVERY)


def compile_for_hopper(width: int) -> int:
    """Bytes of machine code for compute capability 9.0."""
    mask = -1 if width == 8 else (1 << 8 * width) - 1
    source = ASTSource(
        fn=digest_kernel._sum_lanes,
        signature={"bits": f"*i{8 * width}", **SIGNATURE},
        constexprs={"mask": mask, "size": digest_kernel.BLOCK},
    )
    made = triton.compile(source, target=HOPPER, options={"num_warps": digest_kernel.WARPS})
    return len(made.asm["cubin"])


if __name__ == "__main__":
    for case in sys.argv[2:]:
        numbers = [int(word) for word in case.split(",")]
        print(interpret(*numbers) if sys.argv[1] == "interpret" else compile_for_hopper(*numbers))
