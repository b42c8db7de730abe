"""The base-conditioned codec: exact, the same from both backends, smaller, and careful."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.delta import FORMATS, BlockError, Codec, NumberFormat, TileChanges, decode_block
from rose_core.delta.bits import Bits
from rose_core.delta.codec import encode_changes, encode_on_base, find_changes
from tests.delta.strategies import BACKENDS, SLOW_MACHINE, kind_and_pair


def same(one: TileChanges, two: TileChanges) -> bool:
    pairs = ((one.indices, two.indices), (one.steps, two.steps))
    return all(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs)


@given(kind_and_pair(most=300))
@settings(SLOW_MACHINE, max_examples=120)
def test_every_sparse_change_comes_back(case: tuple[NumberFormat, Bits, Bits]) -> None:
    kind, old, new = case
    changes = find_changes(old, new, kind)
    if kind.width > 4:
        with pytest.raises(BlockError, match="too wide"):
            encode_on_base(old, changes, kind)
        return
    blocks = [encode_on_base(old, changes, kind, backend) for backend in BACKENDS]
    assert all(block == blocks[0] for block in blocks)
    assert blocks[0][0] == Codec.RICE
    for backend in BACKENDS:
        found = decode_block(blocks[0], kind, len(old), backend, base=old)
        assert found.indices is not None
        assert same(found, changes)
        result = old.copy()
        result[found.indices] = found.resolve(old[found.indices], kind)
        assert np.array_equal(result, new)


@given(st.data())
@settings(SLOW_MACHINE, max_examples=100)
def test_damage_and_wrong_bases_raise_one_error_or_give_other_changes(data: st.DataObject) -> None:
    kind, old, new = data.draw(kind_and_pair(most=150).filter(lambda case: case[0].width <= 4))
    block = bytearray(encode_on_base(old, find_changes(old, new, kind), kind))
    at = data.draw(st.integers(0, len(block) - 1))
    block[at] ^= 1 << data.draw(st.integers(0, 7))
    for backend in BACKENDS:
        try:
            found = decode_block(bytes(block), kind, len(old), backend, base=old)
        except BlockError:
            continue
        if found.indices is not None and len(found.indices):
            assert 0 <= found.indices[0] <= found.indices[-1] < len(old)


def test_long_gaps_and_far_steps_are_escaped() -> None:
    kind = FORMATS["F32"]
    old = np.full(40_000, np.float32(1.0)).view(np.uint32)
    new = old.copy()
    new[[0, 1, 2, 3, 4, 5, 6, 7, 39_999]] += 1
    new[8] ^= 0x80000000
    changes = find_changes(old, new, kind)
    for backend in BACKENDS:
        block = encode_on_base(old, changes, kind, backend)
        found = decode_block(block, kind, len(old), backend, base=old)
        assert same(found, changes)


def test_it_is_smaller_where_small_weights_change_more_often() -> None:
    random = np.random.default_rng(0)
    kind = FORMATS["BF16"]
    values = random.normal(0, 0.02, 1 << 18).astype(np.float32)
    old = (values.view(np.uint32) >> 16).astype(np.uint16)
    likely = random.random(len(old)) * np.abs(values) < 0.0001
    new = old + likely.astype(np.uint16)
    changes = find_changes(old, new, kind)
    v1, v2 = encode_changes(changes, len(old)), encode_on_base(old, changes, kind)
    assert len(v2) < 0.85 * len(v1)


def test_the_base_is_needed() -> None:
    kind = FORMATS["BF16"]
    old = np.arange(1000, dtype=np.uint16)
    block = encode_on_base(old, find_changes(old, old + np.uint16(1), kind), kind)
    with pytest.raises(BlockError, match="without it"):
        decode_block(block, kind, len(old))


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I16"])
def test_both_backends_write_and_read_the_same_tile_of_all_magnitudes(name: str) -> None:
    random = np.random.default_rng(3)
    kind = FORMATS[name]
    size = 70_001
    old = random.integers(0, 1 << 8 * kind.width, size, np.uint64).astype(kind.unsigned)
    usual = slice(1000, 60_000)
    old[usual] = kind.unsigned.type(int(old[usual].mean())) + (old[usual] >> kind.unsigned.type(4))
    new = old + (random.random(size) < 0.04).astype(kind.unsigned)
    new[random.integers(0, size, 300)] ^= kind.unsigned.type(0x55)
    changes = find_changes(old, new, kind)
    blocks = [encode_on_base(old, changes, kind, backend) for backend in BACKENDS]
    assert all(block == blocks[0] for block in blocks)
    for backend in BACKENDS:
        assert same(decode_block(blocks[0], kind, size, backend, base=old), changes)
