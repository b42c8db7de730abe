"""Numpy twins of ``loops``: the same results without a compiler, a few times slower."""

from __future__ import annotations

import numpy as np

from rose_core.delta import loops
from rose_core.delta.bits import FORMATS, Bits, Indices, ordered, unordered

_FLOATS = {kind.width: kind for kind in FORMATS.values() if kind.sign_magnitude}

_CHUNK = 1 << 16
"""Digest rows are mixed in pieces of this many elements, so that temporaries stay in cache."""


def compare(old: Bits, new: Bits) -> tuple[Indices, Bits, Bits]:
    """Positions where two runs of bits differ, with the bits on either side."""
    indices = np.flatnonzero(old != new).astype(np.int64, copy=False)
    return indices, old[indices], new[indices]


def steps_between(old: Bits, new: Bits) -> Bits:
    """Ordered-integer steps from one run of sign-magnitude values to another."""
    return _ordered(new) - _ordered(old)


def put(flat: Bits, where: Indices, bits: Bits) -> None:
    """Overwrite elements; positions inside ``flat`` are the caller's to check."""
    flat[where] = bits


def holds(flat: Bits, where: Indices, bits: Bits) -> bool:
    """Whether these elements are these bits."""
    return np.array_equal(flat.take(where, mode="clip"), bits)


def move(old: Bits, steps: Bits) -> Bits:
    """Move sign-magnitude values by ordered-integer steps."""
    return _unordered(_ordered(old) + steps)


def _ordered(bits: Bits) -> Bits:
    return ordered(bits, _FLOATS[bits.dtype.itemsize])


def _unordered(integers: Bits) -> Bits:
    return unordered(integers, _FLOATS[integers.dtype.itemsize])


def pack(indices: Indices, steps: Bits) -> tuple[Bits, Bits, Bits]:
    """Ascending positions and steps to gap bytes, code bytes and escaped steps."""
    if not len(indices):
        nothing = np.empty(0, np.uint8)
        return nothing, nothing, np.empty(0, steps.dtype)
    gap = np.diff(indices, prepend=-1) - 1
    more, rest = np.divmod(gap, loops.ESCAPE)
    ends = np.cumsum(more + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, loops.ESCAPE, np.uint8)
    gaps[ends] = rest
    zigzag = _zigzag(steps)
    far = zigzag > loops.ESCAPE
    codes = np.where(far, loops.ESCAPE, zigzag - zigzag.dtype.type(1)).astype(np.uint8)
    return gaps, codes, steps[far]


def unpack(gaps: Bits, codes: Bits, escapes: Bits) -> tuple[Indices, Bits] | None:
    """Bytes back to positions and steps, or None when the streams do not belong together."""
    dtype = escapes.dtype
    positions = np.cumsum(np.where(gaps == loops.ESCAPE, 255, gaps.astype(np.int64) + 1)) - 1
    indices = positions[gaps != loops.ESCAPE]
    far = codes == loops.ESCAPE
    if len(indices) != len(codes) or int(far.sum()) != len(escapes):
        return None
    zigzag = codes.astype(dtype) + dtype.type(1)
    steps = (zigzag >> dtype.type(1)) ^ (dtype.type(0) - (zigzag & dtype.type(1)))
    steps[far] = escapes
    return indices, steps


def digest_run(bits: Bits, first: int, key: int) -> tuple[int, int]:
    """Both lanes of the digest of elements ``first, first + 1, ...`` of a tensor."""
    low = high = 0
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK]
        indices = np.arange(first + start, first + start + len(part), dtype=np.uint64)
        one, two = digest_at(indices, part, key)
        low, high = low + one, high + two
    return low & _EVERY, high & _EVERY


def digest_at(indices: Bits, bits: Bits, key: int) -> tuple[int, int]:
    """Both lanes of the digest of single elements at positions of a tensor."""
    mixed = indices.astype(np.uint64)
    mixed = (mixed + loops.ONE) * loops.GOLDEN + np.uint64(key)
    mixed = (mixed ^ (mixed >> loops.S30)) * loops.MIX1
    mixed = (mixed ^ (mixed >> loops.S27)) * loops.MIX2
    mixed ^= mixed >> loops.S31
    values = bits.astype(np.uint64)
    low = np.sum((mixed | loops.ONE) * values, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> loops.S32)) * loops.MIX3
    high = np.sum(((mixed ^ (mixed >> loops.S32)) | loops.ONE) * values, dtype=np.uint64)
    return int(low), int(high)


def _zigzag(steps: Bits) -> Bits:
    one = steps.dtype.type(1)
    sign = steps >> steps.dtype.type(steps.dtype.itemsize * 8 - 1)
    zigzag: Bits = (steps << one) ^ (steps.dtype.type(0) - sign)
    return zigzag


_EVERY = (1 << 64) - 1
