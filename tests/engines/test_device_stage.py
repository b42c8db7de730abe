"""Deltas decoded and put in where the weights are: the host's bits, undone, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.delta import FORMATS, BlockError, Tiling, digest_run, number_format
from rose_core.delta.bits import Bits
from rose_core.delta.codec import encode_changes, find_changes, read_streams
from rose_engines.ondevice.device_loops import here, there
from rose_engines.ondevice.device_stage import DeviceStage, ahead, packed, unpacked
from tests.delta.strategies import DEVICE, corner_bits

CASES = json.loads((Path(__file__).parents[1] / "delta" / "golden.json").read_text())["blocks"]


def streams_of(old: Bits, new: Bits, word: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kind = FORMATS[word]
    block = encode_changes(find_changes(old, new, kind), len(old))
    return on_device(read_streams(block, kind, len(old)), word)


def on_device(
    streams: tuple[Bits, Bits, Bits] | None, word: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert streams is not None
    lengths = (len(streams[0]), len(streams[1]))
    (copied,) = ahead([(packed(streams), torch.device(DEVICE))])
    return unpacked(copied, lengths, FORMATS[word])


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["case"]))
def test_staging_on_the_device_equals_the_golden_vectors(case: dict[str, str]) -> None:
    kind = number_format(case["dtype"])
    old, new = (np.frombuffer(bytes.fromhex(case[side]), kind.unsigned) for side in ("old", "new"))
    given = read_streams(bytes.fromhex(case["block"]), kind, len(old))
    if given is None:  # a dense block needs no decoding of changes
        given = read_streams(encode_changes(find_changes(old, new, kind), len(old)), kind, len(old))
    flat = there(old, DEVICE)
    stage = DeviceStage(case["name"], kind, flat, Tiling(len(old), 1, len(old), 1))
    moved = stage.add(0, on_device(given, case["dtype"]))
    assert np.array_equal(here(flat), old)
    assert str(digest_run(case["name"], 0, old).plus(moved)) == case["digest_new"]
    for _ in range(2):  # again does no harm
        assert bool(stage.put())
        assert np.array_equal(here(flat), new)
    stage.put_back()
    assert np.array_equal(here(flat), old)


@pytest.mark.parametrize("word", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I32"])
@pytest.mark.parametrize("tile", [(4, 10), (10, 4), (3, 7)])
def test_tiles_along_rows_and_columns_with_every_corner(word: str, tile: tuple[int, int]) -> None:
    kind, draw = FORMATS[word], np.random.default_rng(3)
    cut = Tiling(20, 10, *tile)
    old = draw.integers(0, 256, 200 * kind.width, np.uint8).view(kind.unsigned)
    new = old.copy()
    corners = np.array(corner_bits(kind), np.uint64).astype(kind.unsigned)
    places = draw.permutation(200)
    old[places[: len(corners)]] = corners
    new[places[: len(corners)]] = corners[::-1]
    new[places[100:130]] += kind.unsigned.type(1)
    flat = there(old, DEVICE)
    stage = DeviceStage("w", kind, flat, cut)
    after = digest_run("w", 0, old)
    for number in range(cut.count):
        before, behind = (cut.cut(state, number) for state in (old, new))
        after = after.plus(stage.add(number, streams_of(before, behind, word)))
    assert after == digest_run("w", 0, new)
    assert len(stage.seal().where) == int((old != new).sum())
    assert bool(stage.put())
    assert np.array_equal(here(flat), new)
    stage.put_back()
    assert np.array_equal(here(flat), old)


def test_what_reaches_outside_its_tile_is_refused_and_nothing_is_touched() -> None:
    old = np.zeros(100, np.uint16)
    new = old.copy()
    new[[3, 99]] = 1
    gaps, codes, escapes = streams_of(old, new, "BF16")
    flat = there(old, DEVICE)
    stage = DeviceStage("w", FORMATS["BF16"], flat, Tiling(100, 1, 50, 1))
    for damaged in ((gaps, codes, escapes), (gaps[:1], codes, escapes), (gaps, codes[:1], escapes)):
        with pytest.raises(BlockError, match="do not describe changes of 50"):
            stage.add(0, damaged)
    assert bool(stage.put())
    assert not flat.any()


def test_a_weight_that_does_not_keep_its_bits_is_seen() -> None:
    old = np.zeros(10, np.uint16)
    new = old.copy()
    new[4] = 1
    flat = there(old, DEVICE)
    stage = DeviceStage("w", FORMATS["BF16"], flat, Tiling(10, 1, 10, 1))
    stage.add(0, streams_of(old, new, "BF16"))
    sealed = stage.seal()
    twice = sealed.where.repeat(2), sealed.old.repeat(2), torch.cat([sealed.new, sealed.new + 1])
    stage._tiles = [type(sealed)(*twice, sealed.moved)]
    assert not bool(stage.put())  # one place cannot hold two values


def test_copies_run_one_part_ahead_of_the_caller() -> None:
    asked = []

    def parts() -> Iterator[tuple[torch.Tensor, torch.device]]:
        for number in range(4):
            asked.append(number)
            yield torch.full((2,), number), torch.device(DEVICE)

    for number, part in enumerate(ahead(parts())):
        assert part.device.type == DEVICE
        assert part.tolist() == [number, number]
        assert asked == list(range(min(number + 2, 4)))
    assert list(ahead([])) == []
