"""Parts of tensors: which elements a rank holds, what it stages, and that digests add up."""

from pathlib import Path

import numpy as np
import pytest

from rose_core.delta.digest import digest_run, total
from rose_core.delta.tiles import Tiling
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.canonical import HostTensor, Live
from rose_engines.tensors.slices import Box, SlicedTensor, boxes_of
from rose_engines.weights.live import digest_live, scatter
from rose_engines.weights.staging import stage

V0, V1 = (WeightVersion("run", 1, n) for n in range(2))
ROWS, COLUMNS = 6, 8


def tensor(boxes: tuple[Box, ...], size: int = 100) -> SlicedTensor:
    flat = np.full(size, 60000, np.uint16)
    whole = np.arange(ROWS * COLUMNS, dtype=np.uint16).reshape(ROWS, COLUMNS)
    for box in boxes:
        for row in range(box.rows):
            start = box.first + row * box.source_stride
            place = box.target_first + row * box.target_stride
            end = place + box.columns * box.target_step
            flat[place : end : box.target_step] = whole.ravel()[start : start + box.columns]
    return SlicedTensor("w", "BF16", (ROWS, COLUMNS), boxes, HostTensor("p", "BF16", (size,), flat))


LEFT = Box("p", 0, ROWS, 3, COLUMNS, 5, 4)
RIGHT = Box("p", 3, ROWS, 5, COLUMNS, 7, 6)
UPPER = Box("p", 0, 1, 2 * COLUMNS, 2 * COLUMNS, 9, 2 * COLUMNS)
TURNED = Box("p", 3, ROWS, 5, COLUMNS, 7, 1, ROWS)


@pytest.mark.parametrize("box", [LEFT, RIGHT, UPPER, TURNED])
def test_a_part_answers_for_its_elements_alone(box: Box) -> None:
    part = tensor((box,))
    asked = np.arange(ROWS * COLUMNS)
    where, kept = part.own(slice(0, ROWS * COLUMNS))
    assert kept is not None
    assert np.array_equal(part.take(where), asked[kept])
    assert len(kept) == box.elements
    where, kept = part.own(np.array([1, 5, 47]))
    part.put(where, np.array([7] * len(kept if kept is not None else ()), np.uint16))
    assert set(part.take(where)) <= {7}


def test_digests_of_the_parts_add_up() -> None:
    whole = digest_run("w", 0, np.arange(ROWS * COLUMNS, dtype=np.uint16))
    assert total([tensor((LEFT,)).digest(), tensor((RIGHT,)).digest()]) == whole
    assert tensor((LEFT, RIGHT), 200).digest() != whole  # the two overlap in this parameter
    assert total([tensor((LEFT,)).digest(), tensor((TURNED,)).digest()]) == whole
    assert tensor(()).digest() == total([])


@pytest.mark.parametrize("box", [LEFT, RIGHT, UPPER])
@pytest.mark.parametrize("tile", [(2, 4), (6, 2), (1, 8), (3, 3)])
def test_a_tile_with_a_part_here_is_never_skipped(box: Box, tile: tuple[int, int]) -> None:
    part, cut = tensor((box,)), Tiling(ROWS, COLUMNS, *tile)
    skipped = 0
    for number in range(cut.count):
        _, kept = part.own(cut.flat(number, np.arange(cut.box(number).elements)))
        touches = part.touches(cut.box(number), COLUMNS)
        assert touches or (kept is not None and not len(kept))
        skipped += not touches
    # Rows are told apart by any tile that is a few rows high, columns by one that is a few wide.
    if (box, tile) in {(LEFT, (6, 2)), (UPPER, (1, 8))}:
        assert skipped > 0


def test_copies_become_the_fewest_boxes() -> None:
    rows = list(boxes_of("p", (2, 8), (16, (8, 1)), (40, (8, 1))))
    assert rows == [Box("p", 16, 1, 16, 16, 40, 16)]
    columns = list(boxes_of("p", (6, 4), (4, (8, 1)), (0, (4, 1))))
    assert columns == [Box("p", 4, 6, 4, 8, 0, 4)]
    stack = list(boxes_of("p", (3, 2, 4), (0, (16, 8, 1)), (0, (20, 4, 1))))
    assert [(box.first, box.target_first) for box in stack] == [(0, 0), (16, 20), (32, 40)]
    assert list(boxes_of("p", (1,), (5, (7,)), (2, (9,)))) == [Box("p", 5, 1, 1, 1, 2, 1)]
    turned = list(boxes_of("p", (6, 8), (0, (1, 6)), (0, (8, 1))))
    assert turned == [Box("p", 0, 8, 6, 6, 0, 1, 8)]
    for strides in ((16, 2), (0, 1), (8, 0)):
        with pytest.raises(UnsupportedEngine, match="spreads or repeats"):
            list(boxes_of("p", (6, 8), (0, strides), (0, (8, 1))))


def test_a_stack_that_is_turned_is_found_in_one_pass_as_box_by_box() -> None:
    """SGLang's GPT-OSS keeps the second matrix of every expert transposed."""
    boxes = tuple(boxes_of("p", (3, 4, 5), (0, (20, 1, 4)), (2, (20, 5, 1))))
    assert [box.target_step for box in boxes] == [5] * 3
    flat = np.zeros(70, np.uint16)
    part = SlicedTensor("w", "BF16", (3, 5, 4), boxes, HostTensor("p", "BF16", (70,), flat))
    where, kept = part.own(slice(0, 60))
    assert kept is None
    part.put(where, np.arange(60, dtype=np.uint16))
    wanted = np.arange(60).reshape(3, 5, 4).transpose(0, 2, 1)
    assert np.array_equal(flat[2:62].reshape(3, 4, 5), wanted)
    assert list(part.all_bits()) == list(range(60))
    one, _ = part.own(np.array([59, 21]))
    assert not isinstance(one, slice)
    assert list(one) == [61, 27]
    assert part.digest() == digest_run("w", 0, np.arange(60, dtype=np.uint16))


def halves(state: State, rank: int) -> Live:
    """Rows of the q matrix, columns of the down matrix, and every rank the whole norm."""
    found: dict[str, SlicedTensor | HostTensor] = {}
    for name, (dtype, shape, bits) in state.items():
        if len(shape) == 1:
            found[name] = HostTensor(name, dtype, shape, bits.copy())
            continue
        rows, columns = shape
        if "down" in name:
            half = columns // 2
            box = Box("p", rank * half, rows, half, columns, 0, half)
        else:
            half = rows // 2 * columns
            box = Box("p", rank * half, 1, half, half, 0, half)
        flat = np.zeros(box.elements, bits.dtype)
        part = SlicedTensor(name, dtype, shape, (box,), HostTensor("p", dtype, (1,), flat))
        where, kept = part.own(slice(0, bits.size))
        part.put(where, bits[kept])
        found[name] = part
    return found


@pytest.mark.parametrize("delta", [True, False])
def test_ranks_stage_and_swap_their_part_of_a_bundle(
    tmp_path: Path, old: State, sparse: State, delta: bool
) -> None:
    write_bundle(tmp_path / "b", V1, sparse, (V0, old) if delta else None)
    current = digest_live({name: HostTensor(name, *parts) for name, parts in old.items()})
    for rank in range(2):
        live, wanted = halves(old, rank), halves(sparse, rank)
        update = stage(tmp_path / "b", live, current)
        scatter(update, live)
        for name in live:
            assert np.array_equal(live[name].all_bits(), wanted[name].all_bits())
            assert live[name].digest() == wanted[name].digest()
        whole = sum(len(change.old) for change in update.changes)
        assert whole < 0.7 * update.outline.changes
