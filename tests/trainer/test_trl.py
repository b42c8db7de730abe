"""TRL's calls in its order, with an iterator as tricky as its own, against a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.delta.bits import Bits
from rose_trainer.adapters.trl import WeightTransfer
from rose_trainer.publisher import Publisher
from rose_weights.bundle import Bundle
from tests.trainer.test_publisher import RunningStore
from tests.weights.models import apply_bundle

SHAPES = {"embed.weight": (100, 16), "layer.weight": (16, 16)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    running = RunningStore(tmp_path / "store")
    yield running
    running.close()


def streaming(value: float, drained: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """One buffer for all, overwritten when the next is asked for; notes that it was drained."""
    buffer = torch.empty(100 * 16, dtype=torch.float32)
    for number, (name, shape) in enumerate(SHAPES.items()):
        count = shape[0] * shape[1]
        full = buffer[:count].view(shape)
        full.fill_(value + number)
        yield name, full
        full.fill_(float("nan"))
    drained.append("all")


def test_trl_publishes_every_sync_and_drains_the_iterator(
    store: RunningStore, tmp_path: Path
) -> None:
    publisher = Publisher(store.address, "run", token="t")
    transfer = WeightTransfer(publisher, durable_seconds=60)
    drained: list[str] = []
    transfer.init_weight_transfer()
    for step in range(3):  # AsyncGRPOTrainer._sync_weight
        transfer.pause()
        transfer.send_weights(streaming(float(step), drained))
        transfer.resume()
    transfer.destroy()
    assert drained == ["all"] * 3
    manifest = store.pull(tmp_path / "bundle")
    assert manifest.target == transfer.version
    held: dict[str, Bits] = {
        name: np.zeros(shape[0] * shape[1], "u4") for name, shape in SHAPES.items()
    }
    apply_bundle(held, Bundle(tmp_path / "bundle"))
    assert set(held["embed.weight"].view(np.float32)) == {2.0}
    assert set(held["layer.weight"].view(np.float32)) == {3.0}
