"""Blocks come back bit for bit, whatever the values, whichever backend made or reads them."""

import itertools
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rose_core.delta import (
    FORMATS,
    BlockError,
    Codec,
    NumberFormat,
    TileChanges,
    check_block,
    decode_block,
    encode_tile,
    loops,
    name_of,
    ordered,
    unordered,
    vectors,
)
from rose_core.delta.bits import Bits
from rose_core.delta.codec import encode_changes, encode_dense, find_changes, step
from rose_core.delta.kernels import Backend, kernels
from tests.delta.strategies import (
    BACKENDS,
    KINDS,
    SLOW_MACHINE,
    backend_name,
    corner_bits,
    kind_and_pair,
)


def apply(block: bytes, old: Bits, kind: NumberFormat, backend: Backend = "auto") -> Bits:
    out = old.copy()
    if not block:
        return out
    changes = decode_block(block, kind, len(old), backend)
    where = slice(None) if changes.indices is None else changes.indices
    out[where] = changes.resolve(old[where], kind)
    return out


@given(kind_and_pair())
@settings(SLOW_MACHINE, max_examples=200)
def test_every_tile_comes_back(case: tuple[NumberFormat, Bits, Bits]) -> None:
    kind, old, new = case
    blocks = [encode_tile(old, new, kind, backend)[0] for backend in BACKENDS]
    assert all(block == blocks[0] for block in blocks)
    for backend in BACKENDS:
        assert np.array_equal(apply(blocks[0], old, kind, backend), new)


@given(kind_and_pair())
@settings(SLOW_MACHINE, max_examples=100)
def test_sparse_blocks_come_back_even_where_dense_is_smaller(
    case: tuple[NumberFormat, Bits, Bits],
) -> None:
    kind, old, new = case
    changes = find_changes(old, new, kind)
    assert np.array_equal(apply(encode_changes(changes, len(new)), old, kind), new)


@given(kind_and_pair())
@settings(SLOW_MACHINE, max_examples=60)
def test_dense_blocks_need_no_base(case: tuple[NumberFormat, Bits, Bits]) -> None:
    kind, old, new = case
    block, count = encode_tile(None, new, kind)
    assert count == len(new)
    assert np.array_equal(apply(block, np.zeros_like(old), kind), new)


@pytest.mark.parametrize("kind", [FORMATS["BF16"], FORMATS["F16"], FORMATS["F8_E4M3"]])
def test_the_ordered_map_is_a_bijection_that_keeps_the_order(kind: NumberFormat) -> None:
    bits = np.arange(1 << (8 * kind.width), dtype=kind.unsigned)
    mapped = ordered(bits, kind)
    assert np.array_equal(np.sort(mapped), bits)
    assert np.array_equal(unordered(mapped, kind), bits)
    half = len(bits) // 2
    assert (np.diff(mapped[:half].astype(np.int64)) == 1).all()
    assert int(mapped[0]) - int(mapped[half]) == 1  # +0 stands right above -0


def test_neighbouring_floats_are_one_step_apart() -> None:
    kind = FORMATS["F32"]
    values = np.array([1.0, -1.0, 1e-45, -0.0, 3.4e38], np.float32)
    up = np.nextafter(values, np.float32(np.inf)).view(np.uint32)
    steps = ordered(up, kind) - ordered(values.view(np.uint32), kind)
    # nextafter goes from -0 past +0 to the smallest subnormal.
    assert steps.tolist() == [1, 1, 1, 2, 1]


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I64"])
def test_every_pair_of_corners_survives(name: str, backend: Backend) -> None:
    kind = FORMATS[name]
    old, new = (
        np.array(side, np.uint64).astype(kind.unsigned)
        for side in zip(*itertools.product(corner_bits(kind), repeat=2), strict=True)
    )
    changes = find_changes(old, new, kind, backend)
    block = encode_changes(changes, len(new), backend)
    assert np.array_equal(apply(block, old, kind, backend), new)
    assert changes.indices is not None
    assert changes.steps is not None
    assert np.array_equal(step(old[changes.indices], changes.steps, kind), new[changes.indices])


@given(KINDS, st.lists(st.integers(1, 3000), min_size=0, max_size=50), st.integers(0, 2**32))
@example(FORMATS["BF16"], [255, 256, 255, 510, 511, 1], 0)
@settings(SLOW_MACHINE, max_examples=100)
def test_all_kernels_pack_and_unpack_the_same_streams(
    kind: NumberFormat, gaps: list[int], seed: int
) -> None:
    indices = np.cumsum(np.array(gaps, np.int64)) - 1
    random = np.random.default_rng(seed)
    steps = np.ones(len(gaps), kind.unsigned)
    if len(gaps):
        steps = random.integers(1, 1 << 16, len(gaps), np.uint64).astype(kind.unsigned)
        steps[steps == 0] = 1
    slow = vectors.pack(indices, steps)
    for backend in BACKENDS:
        for one, two in zip(kernels(backend).pack(indices, steps), slow, strict=True):
            assert one.dtype == two.dtype
            assert np.array_equal(one, two)
    plain = [np.empty(len(part) + 8, part.dtype) for part in slow]
    with np.errstate(over="ignore"):
        used, escaped = loops.pack(indices, steps, kind.width * 8, *plain)
    assert (used, escaped) == (len(slow[0]), len(slow[2]))
    assert np.array_equal(plain[0][:used], slow[0])
    for backend in BACKENDS:
        back = kernels(backend).unpack(*slow)
        assert back is not None
        assert np.array_equal(back[0], indices)
        assert np.array_equal(back[1], steps)


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_streams_that_do_not_belong_together_are_refused(backend: Backend) -> None:
    gaps, codes = np.array([0, 3], np.uint8), np.array([0, 255], np.uint8)
    escapes = np.array([700], np.uint16)
    unpack = kernels(backend).unpack
    assert unpack(gaps, codes, escapes) is not None
    assert unpack(gaps[:1], codes, escapes) is None
    assert unpack(gaps, codes[:1], escapes) is None
    assert unpack(gaps, codes, escapes[:0]) is None
    assert unpack(gaps, codes[::-1].copy()[:1], escapes[:0]) is None


def test_no_change_is_no_block() -> None:
    bits = np.arange(100, dtype=np.uint16)
    assert encode_tile(bits, bits.copy(), FORMATS["BF16"]) == (b"", 0)


def test_the_smallest_codec_is_chosen() -> None:
    random = np.random.default_rng(0)
    kind = FORMATS["BF16"]
    old = (random.normal(0, 0.02, 50_000).astype(np.float32).view(np.uint32) >> 16).astype("u2")
    sparse = old.copy()
    sparse[::100] += 1
    other = random.permutation(old)
    noise = random.integers(0, 65536, 50_000, np.uint16)
    assert encode_tile(old, sparse, kind)[0][0] == Codec.STEPS
    assert encode_tile(old, other, kind)[0][0] == Codec.PLANES
    assert encode_tile(old, noise, kind)[0][0] == Codec.RAW
    assert len(encode_dense(other)) < 0.85 * other.nbytes
    assert len(encode_dense(noise)) == noise.nbytes + 24


@given(st.data())
@settings(SLOW_MACHINE, max_examples=150)
def test_damaged_blocks_raise_one_error_only(data: st.DataObject) -> None:
    kind, old, new = data.draw(kind_and_pair(most=200))
    block = bytearray(encode_tile(old, new, kind)[0] or encode_dense(new))
    at = data.draw(st.integers(0, len(block) - 1))
    block[at] ^= 1 << data.draw(st.integers(0, 7))
    cut = bytes(block[: data.draw(st.integers(0, len(block)))])
    for damaged in (bytes(block), cut):
        for backend in BACKENDS:
            try:
                decode_block(damaged, kind, len(old), backend)
            except BlockError as error:
                assert str(error)  # noqa: PT017  # either outcome is right; another error is not


def test_a_block_is_known_by_its_hash() -> None:
    block = encode_dense(np.arange(10, dtype=np.uint16))
    check_block(block, name_of(block))
    with pytest.raises(BlockError, match="fetch it again"):
        check_block(block[:-1] + b"\xff", name_of(block))


def test_a_block_cannot_make_us_allocate_more_than_its_tile() -> None:
    kind = FORMATS["BF16"]
    block = bytearray(encode_dense(np.zeros(100_000, np.uint16)))
    struct.pack_into("<I", block, 4, 10)
    struct.pack_into("<I", block, 8, 10)
    with pytest.raises(BlockError, match="at most 20 can be"):
        decode_block(bytes(block), kind, 10)


def test_changes_without_positions_cannot_be_encoded() -> None:
    with pytest.raises(BlockError, match="without positions"):
        encode_changes(TileChanges(), 10)
