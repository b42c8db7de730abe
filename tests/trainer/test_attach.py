"""A publisher that is attached to a real optimizer's steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.delta import Builder
from rose_trainer.publisher import Publisher
from rose_weights.bundle import Bundle
from tests.trainer.test_publisher import RunningStore, bits_of
from tests.weights.models import apply_bundle


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    running = RunningStore(tmp_path / "store")
    yield running
    running.close()


def test_every_step_is_published_as_the_optimizer_left_it(
    store: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP32 masters under AdamW: BF16 bits of the last step, and most steps never compared twice."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    compared: list[bool] = []
    add = Builder.add

    def spy(builder: Builder, *given: object, **more: object) -> int:
        if len(given) == 3:
            compared.append(given[2] is None)
        return add(builder, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Builder, "add", spy)
    with Publisher(
        store.address, "run", token="t", source=model.state_dict, dtype=torch.bfloat16
    ) as publisher:
        handle = publisher.attach(optimizer, every=2)
        held = None
        for step in range(1, 13):
            optimizer.zero_grad()
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
            if step == 4:
                held = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}
        last = publisher.wait(12, 60)
        early = publisher.wait(4, 60)
        handle.remove()
        optimizer.step()
        assert publisher.head == last.version
    assert last.version.sequence == 5
    assert 0 < last.changes < last.elements
    # The ring has three buffers: each is filled by a plain copy once, and cast into from then on.
    assert compared.count(False) >= 3 * 4
    assert held is not None
    bits = bits_of(held)
    manifest = store.pull(tmp_path / "b", early.version, early.digest)
    assert manifest.target == last.version
    apply_bundle(bits, Bundle(tmp_path / "b"))
    final = publisher_bits(store, tmp_path / "full")
    assert bits.keys() == final.keys()
    assert all(np.array_equal(bits[name], final[name]) for name in bits)


def publisher_bits(store: RunningStore, folder: Path) -> dict[str, np.ndarray]:
    manifest = store.pull(folder)
    found = {
        tensor.name: np.zeros(tensor.elements, tensor.kind.unsigned) for tensor in manifest.tensors
    }
    apply_bundle(found, Bundle(folder))
    return found


def test_nothing_is_attached_without_tensors_to_publish(store: RunningStore) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with (
        Publisher(store.address, "run", token="t") as publisher,
        pytest.raises(ValueError, match="source"),
    ):
        publisher.attach(optimizer)
