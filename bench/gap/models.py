"""Synthetic models of a size, and the same model after a step that changes a share of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from rose_core.delta.bits import Bits
from rose_core.delta.safetensors import StoredTensor
from rose_dev.engine_testing import State
from rose_dev.models import TINY, Recipe
from rose_engines.tensors.safetensors import read_checkpoint

_WIDE = replace(TINY, head_size=64, vocabulary=4096, context=4096, tied=True)
SIZES: dict[str, Recipe] = {
    "tiny": replace(TINY, name="tiny-tied", tied=True),
    "0.5B": replace(
        _WIDE, name="gap-half", layers=32, hidden=1024, intermediate=4096, heads=16, kv_heads=4
    ),
    "1.5B": replace(
        _WIDE, name="gap-big", layers=33, hidden=2048, intermediate=5632, heads=32, kv_heads=8
    ),
}


def changed(name: str, stored: StoredTensor, share: float) -> StoredTensor:
    """The tensor with this share of its elements moved to a neighbouring value."""
    dtype, shape, bits = stored
    return StoredTensor(dtype, shape, bits ^ _chosen(name, bits.size, share))


def _chosen(name: str, size: int, share: float) -> Bits:
    """1 where the element changes, 0 elsewhere; always the same for a name and a share."""
    draw = np.random.default_rng([*name.encode(), round(share * 1e6)])
    chosen = np.zeros(size, np.uint16)
    chosen[draw.integers(0, size, max(1, round(size * share)))] = 1
    return chosen


def pairs(folder: Path, share: float) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    """Every tensor before and after; one at a time, the one before mapped from its file."""
    for name, stored in read_checkpoint(folder).items():
        yield name, stored, changed(name, stored, share)


def states(folder: Path, share: float) -> tuple[State, State]:
    """The whole model before (mapped) and after (in memory)."""
    before = dict(read_checkpoint(folder))
    return before, {name: changed(name, stored, share) for name, stored in before.items()}


def elements(folder: Path) -> int:
    """Number of weights."""
    return sum(math.prod(stored.shape) for stored in read_checkpoint(folder).values())
