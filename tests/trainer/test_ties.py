"""Tied tensors are one only as long as they are: every take looks again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rose_trainer.errors import BadState
from rose_trainer.ondevice import Base, DeviceSnapshot
from rose_trainer.staging import Layout, Snapshot, Taken

State = dict[str, torch.Tensor]


def tied(value: float = 1.0) -> State:
    weight = torch.full((2, 3), value)
    return {"head.w": weight, "ema.w": weight, "norm.w": torch.ones(3)}


def apart(head: float, ema: float) -> State:
    return {"head.w": torch.full((2, 3), head), "ema.w": torch.full((2, 3), ema)} | {
        "norm.w": torch.ones(3)
    }


def on_host(layout: Layout) -> Taken:
    return Snapshot(layout)


def in_its_place(layout: Layout) -> Taken:
    return DeviceSnapshot(layout, Base("host"))


MADE = pytest.mark.parametrize("made", [on_host, in_its_place])
Make = Callable[[Layout], Taken]


@MADE
def test_names_that_have_parted_are_refused(made: Make) -> None:
    snapshot = made(Layout(list(tied().items())))
    snapshot.take(tied())
    with pytest.raises(BadState, match=r"ema\.w was tied to head\.w"):
        snapshot.take(apart(1.0, 2.0))


@MADE
def test_copies_with_the_same_bits_are_still_one(made: Make) -> None:
    snapshot = made(Layout(list(tied().items())))
    snapshot.take(apart(2.0, 2.0))
    assert snapshot.bits("head.w").tolist() == [0x40000000] * 6


@MADE
def test_bits_are_compared_and_not_values(made: Make) -> None:
    snapshot = made(Layout(list(tied().items())))
    with pytest.raises(BadState, match="differs"):
        snapshot.take(apart(0.0, -0.0))
    made(Layout(list(tied().items()))).take(apart(float("nan"), float("nan")))


def test_of_an_iterator_that_overwrites_its_buffer_what_has_parted_is_seen() -> None:
    snapshot = Snapshot(Layout(list(tied().items())))
    buffer = torch.empty(2, 3)

    def gathered(*order: tuple[str, float]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in order:
            yield name, buffer.fill_(value)
        yield "norm.w", torch.ones(3)

    snapshot.take(gathered(("head.w", 3.0), ("ema.w", 3.0)))
    for order in ((("ema.w", 2.0), ("head.w", 1.0)), (("head.w", 1.0), ("ema.w", 2.0))):
        with pytest.raises(BadState, match="differs"):
            snapshot.take(gathered(*order))


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((2, 3), (6,)), ((4,), (2, 3))])
def test_an_iterator_whose_tensors_share_memory_is_refused(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    buffer = torch.zeros(6)
    views = [
        (f"layer.{number}", buffer[: torch.Size(shape).numel()].view(shape))
        for number, shape in enumerate(shapes)
    ]
    with pytest.raises(BadState, match=r"layer\.\d and layer\.\d came out of an iterator"):
        Layout(views, streamed=True)


def test_neighbours_in_one_buffer_do_not_share_memory() -> None:
    buffer = torch.zeros(6)
    layout = Layout([("a", buffer[:3]), ("b", buffer[3:]), ("none", buffer[:0])], streamed=True)
    assert [spec.name for spec in layout.specs] == ["a", "b", "none"]
