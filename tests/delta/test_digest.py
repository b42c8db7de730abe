import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.delta import (
    Digest,
    Tiling,
    digest_at,
    digest_change,
    digest_run,
    digest_tile,
    loops,
    total,
)
from rose_core.delta.digest import NOTHING, from_bytes, tensor_key, to_bytes
from tests.delta.strategies import BACKENDS, SLOW_MACHINE


def bits(seed: int, size: int, dtype: str = "u2") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size * int(dtype[1:]), np.uint8).view(dtype)


@given(st.integers(0, 2**32), st.integers(1, 500), st.sampled_from(["u1", "u2", "u4", "u8"]))
@settings(SLOW_MACHINE, max_examples=80)
def test_all_backends_have_one_digest(seed: int, size: int, dtype: str) -> None:
    part = bits(seed, size, dtype)
    first = seed % 1000
    one, *others = (digest_run("w", first, part, backend) for backend in BACKENDS)
    assert all(other == one for other in others)
    indices = np.arange(first, first + size)
    assert all(digest_at("w", indices, part, backend) == one for backend in BACKENDS)
    with np.errstate(over="ignore"):
        low, high = loops.digest_at(indices[:5], part[:5], tensor_key("w"))
    assert Digest(int(low), int(high)) == digest_run("w", first, part[:5])


@given(st.integers(0, 2**32), st.integers(2, 400))
@settings(SLOW_MACHINE, max_examples=80)
def test_a_change_updates_the_digest_in_its_own_size(seed: int, size: int) -> None:
    old = bits(seed, size)
    new = old.copy()
    where = np.unique(np.random.default_rng(seed).integers(0, size, 5))
    new[where] ^= 0x8001
    before, after = digest_run("w", 7, old), digest_run("w", 7, new)
    assert before.plus(digest_change("w", where + 7, old[where], new[where])) == after
    assert after != before


def test_the_digest_of_a_tensor_is_the_sum_over_any_cut() -> None:
    flat = bits(0, 60 * 48)
    whole = digest_run("w", 0, flat)
    for cut in (Tiling(60, 48, 60, 48), Tiling(60, 48, 7, 48), Tiling(60, 48, 60, 5)):
        tiles = [digest_tile("w", flat, cut, tile) for tile in range(cut.count)]
        assert total(tiles) == whole


def test_swapped_elements_wrong_slices_and_other_tensors_show() -> None:
    flat = np.arange(1, 101, dtype=np.uint16)
    whole = digest_run("w", 0, flat)
    swapped = flat.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert digest_run("w", 0, swapped) != whole
    assert digest_run("w", 1, flat) != whole
    assert digest_run("v", 0, flat) != whole
    assert digest_run("w", 0, np.roll(flat, 50)) != whole


def test_every_single_bit_shows_in_both_lanes() -> None:
    flat = np.zeros(64, np.uint16)
    for bit in range(16):
        changed = flat.copy()
        changed[bit * 3] = 1 << bit
        one, two = digest_run("w", 0, flat), digest_run("w", 0, changed)
        assert one.low != two.low
        assert one.high != two.high


def test_text_and_bytes_come_back() -> None:
    digest = digest_run("w", 0, np.arange(10, dtype=np.uint8))
    assert Digest.parse(str(digest)) == digest
    assert from_bytes(to_bytes([digest, NOTHING])) == [digest, NOTHING]
    assert from_bytes(to_bytes([])) == []
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        Digest.parse("abc")


def test_a_long_run_is_the_sum_of_its_pieces_in_numpy_too() -> None:
    flat = bits(3, 200_000)
    assert digest_run("w", 5, flat, "numpy") == digest_run("w", 5, flat, "numba")
