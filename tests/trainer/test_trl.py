"""TRL's calls in its order, with an iterator as tricky as its own, against a real store."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.delta.bits import Bits
from rose_trainer.adapters.trl import OldestFirst, Reporting, Sample, SessionSample, WeightTransfer
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


@dataclass
class Scored:
    """RolloutSample, as far as the queue matters."""

    name: str
    model_version: int


def queued(*samples: Scored) -> queue.Queue[Sample]:
    waiting: queue.Queue[Sample] = queue.Queue()
    for sample in samples:
        waiting.put(sample)
    return waiting


def test_of_finished_samples_the_oldest_is_trained_on_first() -> None:
    waiting = queued(Scored("a", 3), Scored("b", 2), Scored("c", 3), Scored("d", 2))
    first = OldestFirst(waiting, lambda: 3, staleness=2)
    assert first.qsize() == 4
    # Of the same age they keep their order: a group's samples stay together.
    assert [vars(first.get())["name"] for _ in range(2)] == ["b", "d"]
    waiting.put(Scored("e", 1))
    assert [vars(first.get())["name"] for _ in range(3)] == ["e", "a", "c"]
    assert first.qsize() == 0


def test_what_is_too_old_is_left_to_trl_to_drop() -> None:
    first = OldestFirst(queued(Scored("new", 9), Scored("late", 5)), lambda: 9, staleness=2)
    assert vars(first.get())["name"] == "late"


def test_an_empty_queue_is_trls_own_answer() -> None:
    with pytest.raises(queue.Empty):
        OldestFirst(queued(), lambda: 0, staleness=2).get(timeout=0.01)


@dataclass
class Named:
    """NamedSample, as far as a report matters."""

    session: str
    reward: float = 1.0
    model_version: int = 0
    input_ids: tuple[int, ...] = (1, 2, 3)
    metrics: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = {"reward": self.reward}


@dataclass
class Reporter:
    """What was reported: trained on and dropped, report by report."""

    calls: list[tuple[dict[str, float | None], dict[str, float | None]]] = field(
        default_factory=list
    )

    def __call__(self, *fates: dict[str, float | None]) -> None:
        trained, dropped = fates
        self.calls.append((trained, dropped))


def fresh(sample: SessionSample) -> bool:
    return sample.model_version >= 5


def taking(*samples: Named) -> tuple[Reporting, Reporter]:
    waiting: queue.Queue[Sample] = queue.Queue()
    for sample in samples:
        waiting.put(sample)
    reported = Reporter()
    return Reporting(waiting, fresh, reported), reported


def test_what_trl_takes_is_reported_with_its_reward_and_what_it_drops_too() -> None:
    taken, reported = taking(Named("a", 1.0, 5), Named("b", 0.0, 3), Named("c", float("nan"), 6))
    assert taken.qsize() == 3
    for _ in range(3):
        taken.get(timeout=0.1)
    taken.report(ended=True)
    assert reported.calls == [({"a": 1.0, "c": None}, {"b": 0.0})]
    taken.report(ended=True)
    assert len(reported.calls) == 1


def test_a_conversation_of_several_rows_is_said_once_when_all_have_come() -> None:
    taken, reported = taking(Named("a", 1.0, 4), Named("a", 1.0, 5), Named("b", 0.0, 5))
    taken.get()
    taken.report()
    assert not reported.calls, "more rows of it may come"
    taken.get()
    taken.get()
    taken.report()
    assert reported.calls == [({"a": 1.0}, {})]
    taken.report(ended=True)
    assert reported.calls[1:] == [({"b": 0.0}, {})]


def test_a_row_that_comes_after_its_conversation_was_said_says_nothing() -> None:
    taken, reported = taking(Named("a", 1.0, 5), Named("b", 1.0, 5), Named("a", 1.0, 1))
    taken.get()
    taken.get()
    taken.report()
    taken.get()
    taken.report(ended=True)
    assert reported.calls == [({"a": 1.0}, {}), ({"b": 1.0}, {})]
