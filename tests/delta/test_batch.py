"""Blocks decoded together say what each of them says alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.delta import FORMATS, BlockError, NumberFormat, Tiling, decode_block, encode_tile
from rose_core.delta.batch import decode_batch
from rose_core.delta.bits import Bits
from rose_core.delta.codec import (
    TileChanges,
    encode_changes,
    encode_dense,
    encode_streams,
    find_changes,
)
from tests.delta.strategies import BACKENDS, KINDS, SLOW_MACHINE, kind_and_pair

BF16 = FORMATS["BF16"]


@st.composite
def cut_tensor(draw: st.DrawFn) -> tuple[NumberFormat, Bits, Bits, Tiling]:
    """A tensor before and after, and some cut of it, also one with smaller tiles at its edges."""
    kind, old, new = draw(kind_and_pair())
    columns = draw(st.sampled_from([one for one in range(1, len(old) + 1) if len(old) % one == 0]))
    rows = len(old) // columns
    tiles = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    return kind, old, new, Tiling(rows, columns, *tiles)


def blocks_of(
    old: Bits, new: Bits, cut: Tiling, kind: NumberFormat
) -> tuple[list[bytes], list[int]]:
    """A ``STEPS`` block for every tile that changes."""
    found = []
    for tile in range(cut.count):
        before, after = cut.cut(old, tile), cut.cut(new, tile)
        places = np.flatnonzero(before != after)
        if len(places):
            moved = kind_steps(before[places], after[places], kind)
            found.append((encode_changes(TileChanges(places, moved), len(before)), tile))
    return [block for block, _ in found], [tile for _, tile in found]


def kind_steps(before: Bits, after: Bits, kind: NumberFormat) -> Bits:
    """Steps of single elements, by the codec's own comparison."""
    found = find_changes(np.ascontiguousarray(before), np.ascontiguousarray(after), kind)
    assert found.steps is not None
    return found.steps


@given(cut_tensor())
@settings(SLOW_MACHINE, max_examples=150)
def test_together_as_one_by_one(case: tuple[NumberFormat, Bits, Bits, Tiling]) -> None:
    kind, old, new, cut = case
    blocks, tiles = blocks_of(old, new, cut, kind)
    if not blocks:
        return
    for backend in BACKENDS:
        batch = decode_batch(blocks, tiles, cut, kind, backend)
        made = old.copy()
        made[batch.positions] = TileChanges(steps=batch.steps).resolve(old[batch.positions], kind)
        assert np.array_equal(made, new)
        first = 0
        for block, tile, end in zip(blocks, tiles, batch.ends, strict=True):
            alone = decode_block(block, kind, cut.box(tile).elements, backend)
            assert alone.indices is not None
            assert np.array_equal(batch.positions[first:end], cut.flat(tile, alone.indices))
            first = end


def two_tiles(changes: tuple[list[int], list[int]], elements: int) -> list[bytes]:
    return [
        encode_changes(TileChanges(np.array(one, np.int64), np.ones(len(one), np.uint16)), elements)
        for one in changes
    ]


def test_streams_that_only_fit_as_a_whole_are_refused() -> None:
    """The first block has a gap too few and the second one too many."""
    gaps = np.array([1, 2, 3], np.uint8)
    codes = np.array([1, 1, 1], np.uint8)
    none = np.empty(0, np.uint16)
    blocks = [
        encode_streams((gaps[:2], codes, none), 400),
        encode_streams((np.array([1, 2, 3, 4], np.uint8), codes, none), 400),
    ]
    with pytest.raises(BlockError, match="do not describe 3 of 400"):
        decode_batch(blocks, [0, 1], Tiling(2, 400, 1, 400), BF16)


def test_a_position_behind_its_tile_is_refused_though_the_next_tile_would_take_it() -> None:
    blocks = two_tiles(([3, 399], [0]), 200)
    with pytest.raises(BlockError, match="do not describe 2 of 200"):
        decode_batch(blocks, [0, 1], Tiling(2, 200, 1, 200), BF16)


def test_blocks_of_another_codec_are_refused() -> None:
    dense = encode_dense(np.arange(400, dtype=np.uint16))
    with pytest.raises(BlockError, match="another codec"):
        decode_batch([dense], [0], Tiling(1, 400, 1, 400), BF16)


def test_a_block_that_claims_no_change_is_no_reason_to_misread_its_neighbour() -> None:
    blocks = two_tiles(([], [7]), 400)
    batch = decode_batch(blocks, [0, 1], Tiling(2, 400, 1, 400), BF16)
    assert batch.positions.tolist() == [407]
    assert batch.ends == (0, 1)


@given(KINDS, st.integers(0, 2**32))
@settings(SLOW_MACHINE, max_examples=30)
def test_long_gaps_and_large_steps_keep_to_their_block(kind: NumberFormat, seed: int) -> None:
    draw = np.random.default_rng(seed)
    old = np.zeros(6000, kind.unsigned)
    new = old.copy()
    new[draw.integers(0, 6000, 5)] = draw.integers(1, 256, 5).astype(kind.unsigned)
    cut = Tiling(2, 3000, 1, 3000)
    blocks, tiles = blocks_of(old, new, cut, kind)
    batch = decode_batch(blocks, tiles, cut, kind)
    assert batch.positions.tolist() == np.flatnonzero(new).tolist()
    assert encode_tile(old, new, kind)[1] == len(batch.positions)
