"""A receiver's work on an accelerator: blocks to the device, decoded, staged and put in there.

The streams of a one-percent change of a synthetic BF16 model lie in pinned host memory, tile by
tile. They are staged by ``rose_engines.ondevice.device_stage`` in two ways: each copied, then
decoded; and each copied while the one before is decoded. Copying alone says what the bus takes, so
``hidden`` is the share of it that the second way does not wait for. Putting the changes in is the
pause that a commit would take if engines staged there. Digests are compared before any figure
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.weights.device import WrongDigest
from bench.weights.publishing import SHARE, change, settle
from rose_core.delta import FORMATS, Digest, FoundTile, Tiling, tiling, total
from rose_engines.ondevice import device_digest
from rose_engines.ondevice.device_stage import DeviceStage, ahead, packed, unpacked
from rose_trainer.device_diff import Region, bands, differences

SIZES = {"8B": 8_000_000_000}
_COLUMNS = 1 << 12
_TENSOR = 1 << 27
_BF16 = FORMATS["BF16"]


@dataclass(frozen=True)
class Tile:
    """A tile's change as it waits on the host."""

    tensor: int
    number: int
    streams: torch.Tensor
    lengths: tuple[int, int]


class State:
    """Live weights, and what is to become of them.

    Args:
        elements: in all.
        device: where they lie.
    """

    def __init__(self, elements: int, device: str) -> None:
        self.device = torch.device(device)
        self.live: list[torch.Tensor] = []
        self.cuts: list[Tiling] = []
        self.tiles: list[Tile] = []
        self.moved: list[Digest] = []
        for number, first in enumerate(range(0, elements, _TENSOR)):
            self._add(number, min(_TENSOR, elements - first) // _COLUMNS)

    def stages(self) -> list[DeviceStage]:
        """Empty stages, one per tensor."""
        return [
            DeviceStage(name_of(number), _BF16, flat, cut)
            for number, (flat, cut) in enumerate(zip(self.live, self.cuts, strict=True))
        ]

    def _add(self, number: int, rows: int) -> None:
        cut = tiling(name_of(number), (rows, _COLUMNS))
        count = rows * _COLUMNS
        flat = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16, device=self.device)
        new = flat.clone()
        change({"": new}, SHARE)
        region = Region(name_of(number), _BF16, _COLUMNS, 0, 0, cut)
        for tile in _found(region, flat, new):
            lengths = (len(tile.streams[0]), len(tile.streams[1]))
            self.tiles.append(Tile(number, tile.tile, packed(tile.streams), lengths))
            self.moved.append(tile.moved)
        self.live.append(flat)
        self.cuts.append(cut)


def name_of(number: int) -> str:
    """Name of a tensor."""
    return f"model.layers.{number}.mlp.up_proj.weight"


def _found(region: Region, old: torch.Tensor, new: torch.Tensor) -> Iterator[FoundTile]:
    for band in bands(region.cut):
        for found in differences(region, band, old[band.span], new[band.span]):
            yield from found.tiles


def measure(elements: int, device: str) -> dict[str, Any]:
    """One size.

    Raises:
        WrongDigest: what was staged is not what was found.
    """
    state = State(elements, device)
    changes = sum(tile.lengths[1] for tile in state.tiles)

    def wait(parts: Iterable[tuple[torch.Tensor, torch.device]]) -> Iterator[torch.Tensor]:
        for part, there in parts:
            copied = part.to(there, non_blocking=True)
            settle(device)
            yield copied

    parts = _all(state)
    copying = _timed(lambda: [part.to(state.device, non_blocking=True) for part in parts], device)
    _stage(state, ahead)  # whatever is loaded at first use is loaded now
    serial, _ = _timed_stage(state, wait, device)
    beside, stages = _timed_stage(state, ahead, device)
    before = _digest(state)
    put = _timed(lambda: [stage.put() for stage in stages], device)
    if _digest(state) != before.plus(total(state.moved)):
        raise WrongDigest(f"what was staged on {device} is not what was found")
    return {
        "changes": changes,
        "stream_bytes": sum(part.numel() for part in parts),
        "copy_ms": copying,
        "copy_then_stage_ms": serial,
        "copy_beside_stage_ms": beside,
        "hidden": (serial - beside) / copying if copying else 0.0,
        "staged_changes_per_second": 1000 * changes / beside,
        "put_and_read_back_ms": put,
    }


def _all(state: State) -> list[torch.Tensor]:
    return [tile.streams for tile in state.tiles]


Way = Callable[[Iterable[tuple[torch.Tensor, torch.device]]], Iterator[torch.Tensor]]


def _stage(state: State, way: Way) -> list[DeviceStage]:
    stages = state.stages()
    copied = way((part, state.device) for part in _all(state))
    for tile, streams, moved in zip(state.tiles, copied, state.moved, strict=True):
        found = stages[tile.tensor].add(tile.number, unpacked(streams, tile.lengths, _BF16))
        if found != moved:
            raise WrongDigest(f"tile {tile.number} was decoded wrongly")
    for stage in stages:
        stage.seal()
    return stages


def _timed_stage(state: State, way: Way, device: str) -> tuple[float, list[DeviceStage]]:
    settle(device)
    began = time.perf_counter()
    stages = _stage(state, way)
    settle(device)
    return 1000 * (time.perf_counter() - began), stages


def _timed(work: Callable[[], object], device: str) -> float:
    settle(device)
    began = time.perf_counter()
    work()
    settle(device)
    return 1000 * (time.perf_counter() - began)


def _digest(state: State) -> Digest:
    return total(
        device_digest.digest_run(name_of(number), 0, flat) for number, flat in enumerate(state.live)
    )
