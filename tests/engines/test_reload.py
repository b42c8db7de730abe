"""Engines that load patched checkpoints: the session around a loader that may fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_engines.errors import UnsupportedEngine
from rose_engines.sglang import loading
from rose_engines.sglang.loading import ReloadSession
from rose_engines.tensors.canonical import host_tensors
from rose_engines.tensors.safetensors import read_checkpoint, write_file
from rose_engines.weights.calls import Answer, Attest, Commit, Committed, Export, Refused, Stage

BASE, NEXT, LAST = (WeightVersion("run", 1, number) for number in range(3))


@dataclass
class Loader:
    """An engine's loader; ``held`` is what the engine computes with."""

    held: State
    failures: list[str] = field(default_factory=list)
    loads: list[Path] = field(default_factory=list)

    def __call__(self, path: Path) -> str | None:
        self.loads.append(path)
        if self.failures and (problem := self.failures.pop(0)):
            return problem
        stored = read_checkpoint(path)
        self.held = {name: one._replace(bits=one.bits.copy()) for name, one in stored.items()}
        return None


@pytest.fixture
def model(tmp_path: Path, old: State) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    names = sorted(old)
    for number, part in enumerate((names[:1], names[1:])):
        tensors = host_tensors({name: old[name] for name in part})
        write_file(folder / f"model-{number}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"hidden": 7}))
    return folder


@pytest.fixture
def loader(old: State) -> Loader:
    return Loader(old)


@pytest.fixture
def session(model: Path, tmp_path: Path, loader: Loader) -> ReloadSession:
    return ReloadSession(model, tmp_path / "copies", loader, version=str(BASE))


def commit(session: ReloadSession, version: WeightVersion) -> Answer:
    """With an engine thread that passes boundaries."""
    found: list[Answer] = []
    work: Callable[[], None] = lambda: found.append(session.handle(Commit(str(version))))  # noqa: E731
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        session.on_boundary()
        session.on_rest()
    return found[0]


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name][2], other[name][2]) for name in one
    )


def test_the_engine_loads_what_the_bundle_makes(
    session: ReloadSession, loader: Loader, old: State, sparse: State, tmp_path: Path
) -> None:
    manifest = write_bundle(tmp_path / "there", NEXT, sparse, (BASE, old))
    write_bundle(tmp_path / "back", LAST, old, (NEXT, sparse))
    session.handle(Stage(str(tmp_path / "there")))
    assert loader.loads == []
    assert same(loader.held, old)
    answer = commit(session, NEXT)
    assert isinstance(answer, Committed)
    assert answer.digest == manifest.digest
    assert same(loader.held, sparse)
    assert (loader.loads[0] / "config.json").read_text() == '{"hidden": 7}'
    assert not (loader.loads[0] / "model.safetensors.index.json").exists()
    status = session.status()
    assert (status.version, status.digest, status.attests) == (str(NEXT), manifest.digest, "Copy")

    session.handle(Stage(str(tmp_path / "back")))
    assert isinstance(commit(session, LAST), Committed)
    assert same(loader.held, old)
    assert loader.loads[0] != loader.loads[1]


def test_a_load_that_fails_brings_the_weights_before_back(
    session: ReloadSession, loader: Loader, old: State, sparse: State, tmp_path: Path
) -> None:
    write_bundle(tmp_path / "there", NEXT, sparse, (BASE, old))
    before = session.digest
    session.handle(Stage(str(tmp_path / "there")))
    loader.failures = ["no such tensor"]
    answer = commit(session, NEXT)
    assert isinstance(answer, Refused)
    assert (answer.reason, "no such tensor" in answer.message) == ("LoadFailed", True)
    assert loader.loads[-1] == tmp_path / "model"
    assert same(loader.held, old)
    assert session.version == str(BASE)
    assert session.handle(Attest()).digest == str(before)  # type: ignore[union-attr]

    session.handle(Stage(str(tmp_path / "there")))
    assert isinstance(commit(session, NEXT), Committed)
    assert same(loader.held, sparse)


def test_an_engine_that_can_load_neither_is_broken(
    session: ReloadSession, loader: Loader, old: State, sparse: State, tmp_path: Path
) -> None:
    write_bundle(tmp_path / "there", NEXT, sparse, (BASE, old))
    session.handle(Stage(str(tmp_path / "there")))
    loader.failures = ["gone", "gone too"]
    answer = commit(session, NEXT)
    assert isinstance(answer, Refused)
    assert answer.reason == "Broken"
    assert "gone too" in answer.message
    assert session.broken


def test_a_copy_is_not_exported_as_if_it_were_live(session: ReloadSession, tmp_path: Path) -> None:
    answer = session.handle(Export(str(tmp_path / "x")))
    assert isinstance(answer, Refused)
    assert answer.reason == "Unsupported"


@pytest.mark.parametrize(
    ("fallback", "ranks", "updater", "why"),
    [
        ("", 1, True, "ROSE_LAYOUT_FALLBACK=disk in the engine host's environment"),
        ("disk", 2, True, "an engine over several ranks does not load patched checkpoints"),
        ("disk-always", 2, True, "an engine over several ranks does not load patched checkpoints"),
        ("disk", 1, False, "no update_weights_from_disk"),
    ],
)
def test_an_engine_that_may_or_can_not_load_copies_is_refused_with_both_reasons(
    fallback: str, ranks: int, updater: bool, why: str
) -> None:
    refused = UnsupportedEngine("the loader computes 'a.weight'")
    able = SimpleNamespace(update_weights_from_disk=lambda: None) if updater else None
    scheduler = SimpleNamespace(tp_size=ranks, weight_updater=able)
    with pytest.raises(UnsupportedEngine, match=why) as found:
        loading.check_may_reload(scheduler, fallback, refused)
    assert "the loader computes 'a.weight'" in str(found.value)
    one = SimpleNamespace(update_weights_from_disk=lambda: None)
    loading.check_may_reload(SimpleNamespace(tp_size=1, weight_updater=one), "disk", refused)
