"""FP32 masters to BF16, and what that changes, in one pass over the memory.

A trainer with FP32 masters casts them to publish them. Comparing while casting spares the second
pass over both states that ``Builder`` would make later. Rounds to nearest, ties to even; a NaN
stays one, quiet, with its sign. Next step: ``Builder.add(old, new, changed)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rose_core.delta.bits import Bits, Indices
from rose_core.delta.kernels import Backend, compiled, kernels

CHUNK = 1 << 20
"""Elements compared before their positions are put away."""

_loop = None


def cast(masters: Bits, before: Bits, after: Bits, backend: Backend = "auto") -> Indices:
    """Cast into ``after``; ascending positions where that differs from ``before``.

    Args:
        masters: bits of FP32 values, flat.
        before: BF16 bits that were published before.
        after: where the new BF16 bits go.
        backend: as everywhere; all give the same bits.
    """
    fast = kernels(backend).name == "numba"
    found = []
    room = np.empty(min(CHUNK, masters.size), np.int64)
    for first in range(0, masters.size, CHUNK):
        part = slice(first, first + CHUNK)
        if fast:
            count = _fast()(masters[part], before[part], after[part], room)
            local = room[:count].copy()
        else:
            after[part] = rounded(masters[part])
            local = np.flatnonzero(after[part] != before[part])
        found.append(local + first)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def rounded(masters: Bits) -> Bits:
    """BF16 bits of FP32 bits."""
    half = np.uint32(0x7FFF) + ((masters >> np.uint32(16)) & np.uint32(1))
    nan = (masters & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (masters >> np.uint32(16)) | np.uint32(0x40)
    return np.where(nan, quiet, (masters + half) >> np.uint32(16)).astype(np.uint16)


def _fast() -> Any:  # noqa: ANN401  # a compiled loop
    global _loop  # noqa: PLW0603  # compiled once per process
    if _loop is None:
        _loop = compiled(_cast)
    return _loop


def _cast(masters: Any, before: Any, after: Any, found: Any) -> int:  # noqa: ANN401
    count = 0
    for place in range(len(masters)):
        bits = masters[place]
        if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            value = np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
        else:
            half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            value = np.uint16(np.uint32(bits + half) >> np.uint32(16))
        after[place] = value
        found[count] = place
        count += value != before[place]
    return count
