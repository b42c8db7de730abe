"""Layouts of other delta syncs, with their index widths and zstd levels, as bytes they would send.

Written from their descriptions, without their framing, manifests and headers, so every figure here
is the least they could send; ours counts everything.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import zstandard

from rose_core.delta.bits import Bits, Indices


def _zstd(data: bytes, level: int = 1) -> int:
    return len(zstandard.ZstdCompressor(level=level).compress(data))


def _changed(old: Bits, new: Bits) -> Indices:
    return np.flatnonzero(old != new)


def row_column_value(old: Bits, new: Bits) -> int:
    """Row and column as int32 beside the BF16 value."""
    return len(_changed(old, new)) * 10


def index_value(old: Bits, new: Bits) -> int:
    """Flat int32 index and BF16 value (verl, SparseRL, vLLM, TRL)."""
    return len(_changed(old, new)) * 6


def _gaps(indices: Indices) -> bytes:
    gaps = np.diff(indices, prepend=-1)
    width = np.uint16 if int(gaps.max(initial=0)) < 1 << 16 else np.uint32
    return gaps.astype(width).tobytes()


def gap_value(old: Bits, new: Bits) -> int:
    """u16 gap and BF16 value, zstd-1 (slime's first version)."""
    changed = _changed(old, new)
    return _zstd(_gaps(changed) + new[changed].tobytes())


def gap_xor(old: Bits, new: Bits) -> int:
    """u16 gap and XOR of old and new, zstd-1 (NeMo-RL)."""
    changed = _changed(old, new)
    return _zstd(_gaps(changed) + (old[changed] ^ new[changed]).tobytes())


def dense_xor(old: Bits, new: Bits) -> int:
    """XOR of whole tensors, zstd-1 (slime, miles, Stitch)."""
    return _zstd((old ^ new).tobytes())


PEERS: dict[str, Callable[[Bits, Bits], int]] = {
    "row+column int32, bf16": row_column_value,
    "int32+bf16 (verl, vLLM)": index_value,
    "u16 gap+bf16, zstd-1 (slime v1)": gap_value,
    "dense XOR, zstd-1 (slime, Stitch)": dense_xor,
    "u16 gap+XOR, zstd-1 (NeMo-RL)": gap_xor,
}
