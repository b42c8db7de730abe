"""Which driver runs which CUDA, and what a host says about the one it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rose_agent.devices.nvml import NvmlDriver
from rose_agent.host.discovery.capabilities import Capabilities, built_for
from rose_agent.host.sharing.sharing import SharingMeans
from rose_core.api.reasons import Reason
from rose_core.devices.capabilities import first_missing
from rose_core.devices.drivers import refusal
from rose_dev.gpu.state import State


@pytest.mark.parametrize(
    ("driver", "cuda", "compat", "words"),
    [
        ("580.95.05", (13, 0), False, ()),
        ("595.10", (13, 2), False, ()),
        ("550.163.01", (13, 0), True, ()),
        ("550.163.01", (13, 0), False, ("driver 580", "cuda-compat-13", "550.163.01")),
        ("560.35.03", (13, 0), True, ("driver 580", "does not support")),
        ("470.256.02", (13, 0), False, ("driver 580", "older")),
        ("550.163.01", (12, 9), False, ()),
        (None, (13, 0), False, ()),
        ("what", (13, 0), False, ()),
        ("550.163.01", None, False, ()),
    ],
)
def test_every_row_of_the_table(
    driver: str | None, cuda: tuple[int, int] | None, compat: bool, words: tuple[str, ...]
) -> None:
    found = refusal(driver, cuda, compat=compat)
    assert bool(found) is bool(words)
    for word in words:
        assert word in found


def python_with(folder: Path, version: str) -> Path:
    """A Python whose torch says this, and does nothing else."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise ImportError('must not be imported')\n")
    (folder / "torch/version.py").write_text(version)
    made = folder / "python"
    made.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    made.chmod(0o755)
    return made


def test_what_torch_was_built_for_is_read_without_importing_it(tmp_path: Path) -> None:
    text = "from typing import Optional\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    assert built_for(python_with(tmp_path, text)) == (13, 0)


def test_a_torch_for_no_gpu_has_no_cuda(tmp_path: Path) -> None:
    assert built_for(python_with(tmp_path, "cuda: Optional[str] = None\n")) is None


async def test_a_driver_that_is_too_old_keeps_the_planner_from_lending_and_says_why(
    tmp_path: Path, nvml: State
) -> None:
    """SGLang 0.5.23 is CUDA 13: on driver 550 every engine would end at its start, for ever."""
    nvml.raw.gpu_count, nvml.gpus[0].raw.uuid = 1, b"GPU-a"
    nvml.raw.driver_version = b"550.163.01"
    python = python_with(tmp_path, "cuda: Optional[str] = '13.0'\n")
    host = Capabilities(SharingMeans(), NvmlDriver.open(), 0, python, files=())
    host.compat = tmp_path / "no-such-library"
    await host.refresh()
    missing = first_missing(host.texts, (), ("GPU-a",))
    assert missing is not None
    assert missing.reason == Reason.DRIVER_TOO_OLD
    assert "needs driver 580 or later" in missing.text
    host.compat = tmp_path / "torch/version.py"
    await host.refresh()
    assert first_missing(host.texts, (), ("GPU-a",)) is None
