"""FP32 to BF16 with the comparison on the way: torch's bits, and the positions that differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.delta import casting
from rose_core.delta.build import Builder, TensorSpec, table
from rose_core.delta.casting import cast
from rose_core.delta.kernels import Backend
from rose_core.delta.tiles import tiling
from rose_core.identity import WeightVersion

CORNERS = [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x00008000]
BACKENDS: list[Backend] = ["numba", "numpy"]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(CORNERS)), max_size=60))
def test_bits_are_torchs_and_a_nan_stays_one(backend: Backend, words: list[int]) -> None:
    masters = np.array(words, np.uint32)
    after = np.zeros(len(words), np.uint16)
    cast(masters, after.copy(), after, backend)
    values = torch.from_numpy(masters.view(np.float32).copy())
    wanted = values.to(torch.bfloat16)
    numbers = ~torch.isnan(values).numpy()
    assert np.array_equal(after[numbers], wanted.view(torch.int16).numpy().view("u2")[numbers])
    nans = after[~numbers]
    assert np.all((nans & 0x7FFF) > 0x7F80)
    assert np.array_equal(nans >> 15, masters[~numbers] >> 31)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_are_those_that_differ_over_chunks(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casting, "CHUNK", 100)
    draw = np.random.default_rng(1)
    masters = draw.normal(size=1030).astype(np.float32)
    before = casting.rounded(masters.view(np.uint32))
    masters[::17] *= 1.5
    after = np.zeros_like(before)
    changed = cast(masters.view(np.uint32), before, after, backend)
    assert np.array_equal(changed, np.flatnonzero(before != after))
    assert np.array_equal(changed, np.arange(0, 1030, 17))


@pytest.mark.parametrize("name", ["a.down_proj.weight", "a.q_proj.weight", "embed"])
def test_known_positions_make_the_same_manifest(name: str) -> None:
    """Tiles cut along rows and along columns."""
    shape = (1600, 1200)
    assert tiling(name, shape).count > 1
    draw = np.random.default_rng(2)
    old = draw.integers(0, 1 << 16, 1600 * 1200, dtype=np.uint16)
    new = old.copy()
    new[draw.integers(0, new.size, 20000)] += 3
    tensors = table([TensorSpec(name, "BF16", shape)])
    bare = Builder(tensors, None, lambda _: None)
    bare.add(None, old, blocks=False)
    base = bare.finish(WeightVersion("run", 1, 0))
    found = []
    for changed in (None, np.flatnonzero(old != new)):
        blocks: list[bytes] = []
        builder = Builder(tensors, base, blocks.append, on_base=True)
        builder.add(old, new, changed)
        found.append((builder.finish(WeightVersion("run", 1, 1)), blocks))
    assert found[0] == found[1]
