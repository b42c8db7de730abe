"""A real engine host with fake engines in a run directory of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rose_agent.host.slots.lifecycle import EngineLife
from rose_core.host_reasons import HostReason
from rose_core.wire.host import EngineState, EngineStatus


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder the fake engine can load."""
    folder = tmp_path_factory.mktemp("models")
    model = folder / "small"
    model.mkdir()
    weights = np.arange(64 * 8, dtype=np.float32).reshape(64, 8) / 100
    save_file({"model.layers.0.mlp.up_proj.weight": weights}, model / "model.safetensors")
    return folder


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[EngineStatus]:
    """Engines of hosts in this process, each as it failed: it starts anew after a second."""
    found: list[EngineStatus] = []
    enter = EngineLife._set

    def noted(life: EngineLife, state: EngineState, reason: HostReason) -> None:
        enter(life, state, reason)
        if state is EngineState.FAILED:
            found.append(life.status(""))

    monkeypatch.setattr(EngineLife, "_set", noted)
    return found


@pytest.fixture
def rundir() -> Iterator[Path]:
    """A run directory whose path is short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
