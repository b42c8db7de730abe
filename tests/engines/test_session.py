"""Who may stage, commit and attest when: the session between control and engine thread."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_engines.errors import BrokenWeights
from rose_engines.tensors.canonical import Live, host_tensors
from rose_engines.weights.calls import (
    Abort,
    Activate,
    Activated,
    Attest,
    Attested,
    Commit,
    Committed,
    GetStatus,
    Refused,
    Release,
    Released,
    Stage,
    Staged,
    Status,
)
from rose_engines.weights.session import WeightSession

V0, V1, V2 = (WeightVersion("run", 1, n) for n in range(3))


class Memory:
    """Forgets the weights, and puts back what it was given at the start."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.live: Live = {}
        self.calls: list[str] = []
        self.wrong = False
        self.failing = False

    def release(self) -> int:
        self.calls.append("release")
        if self.failing:
            raise RuntimeError("the kernel refused")
        for tensor in self.live.values():
            tensor.put(slice(None), 0 * tensor.all_bits())
        return 1000

    def restore(self, live: Live) -> None:
        self.calls.append("restore")
        for name, (_, _, bits) in self.state.items():
            live[name].put(slice(None), bits + 1 if self.wrong else bits)


class Engine:
    """An engine thread: rests always, and passes a boundary while ``running``."""

    def __init__(self, state: State) -> None:
        self.labels: list[str] = []
        self.memory = Memory(state)
        self.memory.live = host_tensors(
            {n: one._replace(bits=one.bits.copy()) for n, one in state.items()}
        )
        self.session = WeightSession(
            self.memory.live, str(V0), set_label=self._label, memory=self.memory
        )
        self.running = threading.Event()
        self._halted = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _label(self, version: str) -> int:
        # The label is last: the weights are there before anything can carry it.
        assert self.session.version == version
        self.labels.append(version)
        return 2

    def _run(self) -> None:
        while not self._end.is_set():
            self.session.on_rest()
            if self.running.is_set():
                self._halted.clear()
                self.session.on_boundary()
            else:
                self._halted.set()
            time.sleep(0.001)

    def halt(self) -> None:
        """No boundary is passed from now on."""
        self._halted.clear()
        self.running.clear()
        assert self._halted.wait(60)

    def end(self) -> None:
        self._end.set()
        self._thread.join(30)


@pytest.fixture
def engine(old: State) -> Iterator[Engine]:
    engine = Engine(old)
    engine.running.set()
    yield engine
    engine.end()


@pytest.fixture
def bundle(tmp_path: Path, old: State, sparse: State) -> Path:
    write_bundle(tmp_path / "bundle", V1, sparse, (V0, old))
    return tmp_path / "bundle"


def status(engine: Engine) -> Status:
    answer = engine.session.handle(GetStatus())
    assert isinstance(answer, Status)
    return answer


def test_a_staged_version_is_live_after_its_commit_and_attests_to_its_digest(
    engine: Engine, bundle: Path
) -> None:
    before = status(engine)
    staged = engine.session.handle(Stage(str(bundle)))
    assert isinstance(staged, Staged)
    assert staged.base == before.digest
    assert (status(engine).phase, status(engine).staged) == ("Staged", str(V1))
    assert status(engine).version == str(V0)
    committed = engine.session.handle(Commit(str(V1)))
    assert isinstance(committed, Committed)
    assert committed.digest == staged.digest
    assert committed.fenced_requests == 2
    assert engine.labels == [str(V1)]
    after = status(engine)
    assert (after.phase, after.staged, after.version, after.commits) == ("Idle", "", str(V1), 1)
    attested = engine.session.handle(Attest())
    assert isinstance(attested, Attested)
    assert attested.digest == staged.digest


def test_commit_without_boundary_stays_staged(engine: Engine, bundle: Path) -> None:
    engine.session.handle(Stage(str(bundle)))
    engine.halt()
    refused = engine.session.handle(Commit(str(V1), timeout_seconds=0.05))
    assert isinstance(refused, Refused)
    assert refused.reason == "Busy"
    engine.running.set()
    time.sleep(0.05)
    assert status(engine).version == str(V0)  # the withdrawn commit does not come late
    assert isinstance(engine.session.handle(Commit(str(V1))), Committed)


def test_a_version_that_is_not_staged_is_not_committed(engine: Engine, bundle: Path) -> None:
    refused = engine.session.handle(Commit(str(V1)))
    assert isinstance(refused, Refused)
    assert refused.reason == "NotStaged"
    engine.session.handle(Stage(str(bundle)))
    refused = engine.session.handle(Commit(str(V2)))
    assert isinstance(refused, Refused)
    assert "run@1.1 is" in refused.message


def test_an_aborted_stage_cannot_be_committed(engine: Engine, bundle: Path) -> None:
    engine.session.handle(Stage(str(bundle)))
    answer = engine.session.handle(Abort())
    assert isinstance(answer, Status)
    assert (answer.phase, answer.staged) == ("Idle", "")
    assert isinstance(engine.session.handle(Commit(str(V1))), Refused)
    assert isinstance(engine.session.handle(Abort()), Status)


def test_failed_stage_forgets_the_one_before(engine: Engine, bundle: Path, tmp_path: Path) -> None:
    engine.session.handle(Stage(str(bundle)))
    refused = engine.session.handle(Stage(str(tmp_path / "absent")))
    assert isinstance(refused, Refused)
    assert refused.reason == "Corrupt"
    assert status(engine).phase == "Idle"
    assert isinstance(engine.session.handle(Stage(str(bundle))), Staged)


def test_same_bundle_again_is_a_wrong_base(engine: Engine, bundle: Path) -> None:
    engine.session.handle(Stage(str(bundle)))
    engine.session.handle(Commit(str(V1)))
    refused = engine.session.handle(Stage(str(bundle)))
    assert isinstance(refused, Refused)
    assert refused.reason == "WrongBase"


def test_broken_weights_refuse_everything(
    engine: Engine, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BrokenWeights("memory")

    engine.session.handle(Stage(str(bundle)))
    monkeypatch.setattr("rose_engines.weights.session.commit", fail)
    refused = engine.session.handle(Commit(str(V1)))
    assert isinstance(refused, Refused)
    assert refused.reason == "Broken"
    assert engine.session.broken
    assert status(engine).phase == "Broken"
    assert isinstance(engine.session.handle(Attest()), Refused)
    assert isinstance(engine.session.handle(Stage(str(bundle))), Refused)
    assert engine.labels == []


def test_a_swap_that_is_not_confirmed_is_undone_and_labelled_as_before(
    engine: Engine, bundle: Path, old: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine serves meanwhile: it has two labels, and ends with the old one and its bits."""
    before = status(engine)
    engine.session.handle(Stage(str(bundle)))
    monkeypatch.setattr("rose_engines.weights.session.confirm", lambda *_: "a.norm is wrong")
    refused = engine.session.handle(Commit(str(V1)))
    assert isinstance(refused, Refused)
    assert refused.reason == "DigestMismatch"
    assert engine.labels == [str(V1), str(V0)]
    after = status(engine)
    assert (after.version, after.digest, after.phase) == (str(V0), before.digest, "Idle")
    assert after.commits == 2  # no cache key of the wrong weights comes back
    attested = engine.session.handle(Attest())
    assert isinstance(attested, Attested)
    assert attested.digest == before.digest
    monkeypatch.undo()
    engine.session.handle(Stage(str(bundle)))
    assert isinstance(engine.session.handle(Commit(str(V1))), Committed)


def test_weights_are_confirmed_once_they_were_looked_at(
    engine: Engine, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing that they compute is kept under their digest."""
    meanwhile: list[bool] = []

    def look(*_: object) -> None:
        meanwhile.append(engine.session.confirmed)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("bug")

    assert engine.session.confirmed
    engine.session.handle(Stage(str(bundle)))
    monkeypatch.setattr("rose_engines.weights.session.confirm", look)
    assert isinstance(engine.session.handle(Commit(str(V1))), Committed)
    assert meanwhile == [False]
    assert engine.session.confirmed

    engine.session.handle(Release())
    engine.session.handle(Activate())
    engine.session.handle(Stage(str(bundle)))
    monkeypatch.setattr("rose_engines.weights.session.confirm", fail)
    assert isinstance(engine.session.handle(Commit(str(V1))), Refused)
    assert [*meanwhile, engine.session.confirmed] == [False, False]
    assert isinstance(engine.session.handle(Attest()), Attested)
    assert engine.session.confirmed


def test_a_swap_that_can_be_neither_confirmed_nor_undone_breaks_the_engine(
    engine: Engine, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.session.handle(Stage(str(bundle)))

    def spoil(*_: object) -> str:
        weights = engine.memory.live["a.norm.weight"]
        weights.put(slice(95, 96), weights.take(slice(95, 96)) ^ 8)
        return "a.norm is wrong"

    monkeypatch.setattr("rose_engines.weights.session.confirm", spoil)
    monkeypatch.setattr("rose_engines.weights.live.put_back", lambda *_: None)
    refused = engine.session.handle(Commit(str(V1)))
    assert isinstance(refused, Refused)
    assert refused.reason == "Broken"
    assert engine.session.broken


def test_unexpected_error_is_a_refusal(
    engine: Engine, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr("rose_engines.weights.session.stage", fail)
    refused = engine.session.handle(Stage(str(bundle)))
    assert isinstance(refused, Refused)
    assert "ZeroDivisionError" in refused.message
    assert status(engine).phase == "Idle"


def test_commits_race_with_boundaries(
    engine: Engine, tmp_path: Path, old: State, sparse: State, flip: Callable[[Path], None]
) -> None:
    """Back and forth with tiny timeouts: each commit happened or did not, never half."""
    write_bundle(tmp_path / "there", V1, sparse, (V0, old))
    write_bundle(tmp_path / "back", V2, old, (V1, sparse))
    here = [("there", V1), ("back", V2)]
    digests = set()
    for _ in range(30):
        name, version = here[0]
        engine.session.handle(Stage(str(tmp_path / name)))
        answer = engine.session.handle(Commit(str(version), timeout_seconds=0.001))
        attested = engine.session.handle(Attest())
        assert isinstance(attested, Attested)
        if isinstance(answer, Committed):
            assert attested.digest == answer.digest
            here.reverse()
        digests.add(attested.digest)
    assert len(digests) <= 2


# --- memory


def test_memory_is_released_while_the_permit_is_closed(engine: Engine, bundle: Path) -> None:
    engine.halt()
    engine.session.handle(Stage(str(bundle)))
    answer = engine.session.handle(Release())
    assert isinstance(answer, Released)
    assert answer.claimed_bytes == 1000
    status = engine.session.status()
    assert (status.phase, status.digest, status.staged) == ("Dormant", "", "")


def test_a_dormant_engine_takes_no_weights(engine: Engine, bundle: Path) -> None:
    engine.session.handle(Release())
    for call in (Stage(str(bundle)), Commit(str(V1)), Attest()):
        answer = engine.session.handle(call)
        assert isinstance(answer, Refused)
        assert answer.reason == "Dormant"
    assert isinstance(engine.session.handle(Abort()), Status)
    assert engine.session.dormant


def test_activation_waits_for_a_boundary_and_restores_the_first_weights(
    engine: Engine, bundle: Path
) -> None:
    engine.session.handle(Stage(str(bundle)))
    assert isinstance(engine.session.handle(Commit(str(V1))), Committed)
    engine.halt()
    engine.session.handle(Release())
    late = engine.session.handle(Activate(timeout_seconds=0.02))
    assert isinstance(late, Refused)
    assert late.reason == "Busy"
    assert engine.memory.calls == ["release"]
    engine.running.set()
    answer = engine.session.handle(Activate())
    assert isinstance(answer, Activated)
    assert answer.version == str(V0)
    assert engine.labels[-1] == str(V0)
    assert answer.digest == engine.session.status().digest
    assert isinstance(engine.session.handle(Stage(str(bundle))), Staged)


def test_release_and_activation_again_change_nothing(engine: Engine) -> None:
    assert isinstance(engine.session.handle(Activate()), Activated)
    engine.session.handle(Release())
    assert engine.session.handle(Release()) == Released(0, 0.0)
    assert engine.memory.calls == ["release"]


@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_memory_that_does_not_come_back_right_breaks_the_engine(engine: Engine, fault: str) -> None:
    setattr(engine.memory, fault, True)
    answers = [engine.session.handle(Release()), engine.session.handle(Activate())]
    assert isinstance(answers[-1], Refused)
    assert answers[-1].reason == "Broken"
    assert engine.session.broken


def test_an_engine_without_that_face_refuses_to_release(old: State) -> None:
    session = WeightSession(host_tensors(old), str(V0))
    answer = session.handle(Release())
    assert isinstance(answer, Refused)
    assert answer.reason == "Unsupported"
