"""Slots of one engine for adapters of several runs: who has which, and what each may do."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_engines.tensors.canonical import Live, host_tensors
from rose_engines.weights.adapters import AdapterSession, AdapterSlots
from rose_engines.weights.calls import (
    Attest,
    Attested,
    Bind,
    Commit,
    Committed,
    Draft,
    GetStatus,
    Refused,
    Release,
    Stage,
    Staged,
    Status,
    Unbind,
)
from rose_engines.weights.live import digest_live

NAME = "base_model.model.layers.0.q_proj.lora_A.weight"


def state(value: int) -> State:
    return {NAME: StoredTensor("F32", (4, 8), np.full(32, value, "<u4"))}


@dataclass
class Engine:
    """Slots, and a thread that passes boundaries as an engine's does."""

    slots: AdapterSlots
    lives: Sequence[Live]
    live_requests: list[int]
    labels: list[list[str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def bring(self, folder: Path, run: str, sequence: int, value: int) -> Committed:
        version = WeightVersion(run, 1, sequence)
        write_bundle(folder / str(version), version, state(value))
        assert isinstance(self.slots.handle(Stage(str(folder / str(version)), run)), Staged)
        answer = self.slots.handle(Commit(str(version), run=run))
        assert isinstance(answer, Committed), answer
        return answer


def bound(slots: AdapterSlots, *runs: str) -> None:
    for number, run in enumerate(runs):
        assert isinstance(slots.handle(Bind(run, first=number == 0)), Status)


@pytest.fixture
def engine() -> Iterator[Engine]:
    lives = [host_tensors(state(0)) for _ in range(3)]
    left = [0, 0, 0]
    ended: list[int] = []

    def end(number: int) -> int:
        ended.append(number)
        return left[number]

    labels: list[list[str]] = [[], [], []]

    def label(number: int, version: str) -> int:
        labels[number].append(version)
        return 0

    sessions = [
        AdapterSession(live, "base", partial(label, number), end_requests=partial(end, number))
        for number, live in enumerate(lives)
    ]
    made = Engine(AdapterSlots(sessions, 128), lives, left, labels, ended)

    def iterate() -> None:
        while not made.stop.wait(0.001):
            made.slots.on_boundary()

    thread = threading.Thread(target=iterate, daemon=True)
    thread.start()
    yield made
    made.stop.set()
    thread.join()


def test_each_run_has_a_slot_and_the_next_one_is_refused_by_name(engine: Engine) -> None:
    bound(engine.slots, "a", "b", "c", "a")
    answer = engine.slots.handle(Bind("d"))
    assert isinstance(answer, Refused)
    assert answer.reason == "Full"
    assert "adapters of b, c are here" in answer.message
    status = engine.slots.handle(GetStatus("b"))
    assert isinstance(status, Status)
    assert (status.run, status.runs, status.adapter_bytes) == ("b", ("a", "b", "c"), 128)
    assert isinstance(engine.slots.handle(GetStatus("d")), Refused)


def test_a_request_gets_the_adapter_of_the_run_that_its_key_names(engine: Engine) -> None:
    bound(engine.slots, "a", "b")
    assert engine.slots.slot_for("b@1.7") == 1
    assert engine.slots.slot_for("b@1.7/mine@1.2\nb:b@1.7#3") == 1
    assert engine.slots.slot_for("a@0.0") == 0
    assert engine.slots.slot_for("c@1.0") is None
    assert engine.slots.slot_for("") == 0


def test_a_commit_of_one_run_changes_nothing_of_another(engine: Engine, tmp_path: Path) -> None:
    bound(engine.slots, "a", "b")
    first = engine.bring(tmp_path, "a", 0, 11)
    before = engine.slots[1].digest, engine.slots[1].commits, engine.slots[1].version
    second = engine.bring(tmp_path, "a", 1, 12)
    assert first.digest != second.digest
    assert (engine.slots[1].digest, engine.slots[1].commits, engine.slots[1].version) == before
    assert not engine.lives[1][NAME].all_bits().any()
    engine.bring(tmp_path, "b", 4, 13)
    for run, version, value in (("a", "a@1.1", 12), ("b", "b@1.4", 13)):
        attested = engine.slots.handle(Attest(run))
        assert isinstance(attested, Attested)
        number = engine.slots.slot_for(version)
        assert number is not None
        assert (engine.lives[number][NAME].all_bits() == value).all()
        assert attested.digest == str(digest_live(engine.lives[number]))
        assert attested.version == version


def test_a_version_of_another_run_is_refused(engine: Engine, tmp_path: Path) -> None:
    bound(engine.slots, "a", "b")
    write_bundle(tmp_path / "x", WeightVersion("b", 1, 0), state(5))
    answer = engine.slots.handle(Stage(str(tmp_path / "x"), "a"))
    assert isinstance(answer, Refused)
    assert "is no version of run a" in answer.message
    status = engine.slots.handle(GetStatus("a"))
    assert isinstance(status, Status)
    assert (status.phase, status.staged) == ("Idle", "")


def test_a_run_that_goes_takes_no_new_request_and_leaves_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    bound(engine.slots, "a", "b")
    engine.bring(tmp_path, "b", 0, 21)
    engine.live_requests[1] = 2
    answer = engine.slots.handle(Unbind("b"))
    assert isinstance(answer, Refused)
    assert (answer.reason, engine.ended) == ("Busy", [1])
    assert engine.slots.slot_for("b@1.0") is None
    assert (engine.lives[1][NAME].all_bits() == 21).all()  # its last requests are still its own
    engine.live_requests[1] = 0
    assert isinstance(engine.slots.handle(Unbind("b")), Status)
    assert not engine.lives[1][NAME].all_bits().any()
    assert engine.labels[1] == ["b@1.0", "base"]  # what comes next is no version of b
    keys = engine.slots[1].commits
    assert isinstance(engine.slots.handle(Bind("c")), Status)
    assert engine.slots.slot_for("c@0.0") == 1
    assert (engine.slots[1].version, engine.slots[1].commits) == ("base", keys)
    assert keys == 2  # one commit, and what was taken away: no key is made twice
    assert isinstance(engine.slots.handle(Unbind("nobody")), Status)


def test_a_run_that_comes_back_while_it_goes_stays(engine: Engine, tmp_path: Path) -> None:
    bound(engine.slots, "a", "b")
    engine.bring(tmp_path, "b", 0, 31)
    engine.live_requests[1] = 1
    assert isinstance(engine.slots.handle(Unbind("b")), Refused)
    bound(engine.slots, "b")
    assert engine.slots.slot_for("b@1.0") == 1
    assert engine.slots[1].version == "b@1.0"


def test_a_run_that_is_bound_while_its_unbinding_waits_for_a_boundary_is_not_zeroed() -> None:
    lives = [host_tensors(state(0)) for _ in range(2)]
    ended: list[int] = []
    waiting = threading.Event()

    def end() -> int:
        ended.append(1)
        return 0

    sessions = [AdapterSession(live, "base", wake=waiting.set, end_requests=end) for live in lives]
    slots = AdapterSlots(sessions)
    bound(slots, "a", "b")
    lives[1][NAME].put(slice(0, 32), np.full(32, 41, "<u4"))
    answers: list[object] = []
    waiting.clear()
    taking = threading.Thread(target=lambda: answers.append(slots.handle(Unbind("b", 30.0))))
    taking.start()
    assert waiting.wait(30)
    bound(slots, "a", "b")
    while taking.is_alive():
        slots.on_boundary()
    (answer,) = answers
    assert isinstance(answer, Refused)
    assert (answer.reason, ended) == ("Bound", [])
    assert (lives[1][NAME].all_bits() == 41).all()
    assert slots.slot_for("b@1.0") == 1


def test_who_names_no_run_gets_the_first_runs_whenever_that_was_bound(engine: Engine) -> None:
    for run, first in (("c", False), ("b", False), ("a", True)):
        assert isinstance(engine.slots.handle(Bind(run, first)), Status)
    assert engine.slots[0].run == "a"
    assert [engine.slots.slot_for(f"{run}@1.0") for run in ("c", "b", "a")] == [1, 2, 0]
    engine.live_requests[0] = 1
    assert isinstance(engine.slots.handle(Unbind("a")), Refused)
    assert engine.slots.slot_for("a@1.0") is None
    assert engine.slots.slot_for("") == 0  # a health check is no turn of a run
    assert isinstance(engine.slots.handle(Bind("")), Refused)


def test_an_engine_with_one_adapter_asks_for_no_run(tmp_path: Path) -> None:
    slots = AdapterSlots([AdapterSession(host_tensors(state(0)), "base")])
    assert slots.slot_for("anything@1.0") == slots.slot_for("") == 0
    assert isinstance(slots.handle(Bind("a")), Refused)
    for call in (Release(), Draft([[1, 2]])):
        assert isinstance(slots.handle(call), Refused)
    write_bundle(tmp_path / "x", WeightVersion("any", 1, 0), state(5))
    assert isinstance(slots.handle(Stage(str(tmp_path / "x"))), Staged)
