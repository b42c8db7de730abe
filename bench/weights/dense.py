"""``python -m bench.weights.dense``: the format's blocks beside XOR of the bytes, for many changes.

At an optimizer's densities a tile's XOR is twice as large (``python -m bench.weights``). The
question here is whether it would help as a fallback where half of a tile changes, or all of it.
Sizes are those of fixed draws, so they are the same on every machine. Next step:
docs/decisions/0012 reads the ratios.
"""

from __future__ import annotations

import sys

import numpy as np
import zstandard

from bench.record import figure, record
from bench.weights.generator import to_bf16
from bench.weights.ours import KIND
from rose_core.delta.bits import Bits
from rose_core.delta.codec import encode_tile

ELEMENTS = 1 << 20
DENSITIES = (0.05, 0.2, 0.5, 0.9, 1.0)
SPREADS = (1, 4, 64, 2000, 0)
"""Mean size of a step in units of the last place; 0 = an unrelated new value."""


def changed(old: Bits, density: float, spread: int, seed: int) -> Bits:
    """A share of the elements moved by about so much."""
    draw = np.random.default_rng(seed)
    moved = draw.random(len(old)) < density
    if not spread:
        return np.where(moved, weights(seed + 1), old)
    steps = np.rint(draw.laplace(0, spread, len(old))).astype(np.int64)
    steps[steps == 0] = 1
    return np.where(moved, (old.astype(np.int64) + steps).astype(np.uint16), old)


def weights(seed: int) -> Bits:
    """As a matrix of a model has them."""
    return to_bf16(np.random.default_rng(seed).normal(0, 0.02, ELEMENTS).astype(np.float32))


def xor_bytes(old: Bits, new: Bits) -> int:
    """The smallest of: XOR as it lies, XOR by byte planes, at zstd's levels 1 and 3."""
    difference = old ^ new
    planes = difference.view(np.uint8).reshape(-1, 2).T
    packers = [zstandard.ZstdCompressor(level=level) for level in (1, 3)]
    sizes = [len(packer.compress(difference.tobytes())) for packer in packers]
    sizes += [sum(len(packer.compress(plane.tobytes())) for plane in planes) for packer in packers]
    return min(sizes)


def main() -> int:
    """Report our block's size as a share of the smallest XOR's."""
    old = weights(0)
    figures = []
    for density in DENSITIES:
        for spread in SPREADS:
            new = changed(old, density, spread, seed=7)
            block, _ = encode_tile(old, new, KIND)
            name = f"{density:.0%} by {spread or 'an unrelated value'}: block / XOR"
            figures.append(figure(name, len(block) / xor_bytes(old, new), ""))
    record("weights-dense", figures, notes=[f"BF16, {ELEMENTS} weights"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
