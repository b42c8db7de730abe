"""Runs in the environment of the engine: the scatter by Triton's interpreter or for Hopper.

Per argument a line is printed: what the kernel left where it should not have, or the size of its
machine code.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rose_engines.ondevice import scatter_kernel
from rose_engines.tensors.parameters import DeviceTensor
from rose_engines.weights import fused_scatter
from rose_engines.weights.fused_scatter import FusedScatter, KernelLane, StagedScatter

HOPPER = GPUTarget("cuda", 90, 32)
SIGNATURE = {"table": "*i64", "offsets": "*i32", "wrong": "*i64", "size": "constexpr"}


def interpret(width: int, seed: int) -> str:
    """Tensors of several sizes: put in, put back, and one place that shall hold two values."""
    draw = np.random.default_rng(seed)

    def bits(size: int) -> np.ndarray:
        return draw.integers(0, 256, size * width, np.uint8).view(f"u{width}")

    states = [bits(size) for size in (5, 3000, 2500, 1024)]
    signed = "u1" if width == 1 else f"i{width}"
    flats = [torch.from_numpy(one.view(signed).copy()) for one in states]
    live = {f"t{n}": DeviceTensor(f"t{n}", "x", flat.shape, flat) for n, flat in enumerate(flats)}
    wheres: list[slice | np.ndarray] = [
        np.array([4, 0]), draw.permutation(3000)[:2100], slice(100, 2300), np.zeros(0, np.int64)
    ]  # fmt: skip
    staged, wanted = [], [one.copy() for one in states]
    for number, where in enumerate(wheres):
        old = states[number][where]
        staged.append(StagedScatter(f"t{number}", where, bits(old.size), old))
        wanted[number][where] = staged[-1].new
    fused = FusedScatter(staged, live, KernelLane(flats[0], scatter_kernel))
    for work, expected in ((fused.put, wanted), (fused.put, wanted), (fused.put_back, states)):
        if wrong := work():
            return f"{wrong}-is-said-to-be-wrong"
        for number, one in enumerate(expected):
            if not np.array_equal(flats[number].numpy().view(f"u{width}"), one):
                return f"t{number}-is-wrong"
    twice = StagedScatter("t1", np.array([7, 9, 7]), np.array([1, 2, 3], f"u{width}"), bits(3))
    reported = FusedScatter([staged[0], twice], live, KernelLane(flats[0], scatter_kernel)).put()
    return "right" if reported == "t1" else f"two-values-in-one-place:{reported}"


def compile_for_hopper(width: int) -> int:
    """Bytes of machine code for compute capability 9.0."""
    word = "u8" if width == 1 else f"i{8 * width}"
    source = ASTSource(
        fn=scatter_kernel._scatter_chunks,
        signature={"table": "*i64", "offsets": "*i32", "values": f"*{word}", **SIGNATURE},
        constexprs={"size": fused_scatter.CHUNK},
    )
    made = triton.compile(source, target=HOPPER, options={"num_warps": scatter_kernel.WARPS})
    if "ld.volatile.global" not in made.asm["ptx"]:
        return 0  # it would compare with what it remembers having written
    return len(made.asm["cubin"])


if __name__ == "__main__":
    for case in sys.argv[2:]:
        numbers = [int(word) for word in case.split(",")]
        print(interpret(*numbers) if sys.argv[1] == "interpret" else compile_for_hopper(*numbers))
