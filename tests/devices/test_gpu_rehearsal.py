"""The GPU of a rehearsal: its list of processes is true, and is asked through NVML's own C ABI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu.__main__ import Accountant, descendants, resident_bytes
from bench.gpu.beside import Nvml
from bench.gpu.commits import HostSaver
from rose_dev.gpu.state import State
from rose_dev.waiting import wait_until

torch = pytest.importorskip("torch")

HELD = 64 << 20
_CODE = f"held = bytearray({HELD}); print(len(held), flush=True); input()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process of ours that holds memory."""
    made = subprocess.Popen(
        [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert made.stdout is not None
    assert made.stdout.readline()
    try:
        yield made
    finally:
        made.kill()
        made.communicate()


def test_a_started_process_is_on_the_gpu_with_what_it_holds_and_gone_when_killed(
    nvml: State, child: subprocess.Popen[str]
) -> None:

    with Accountant(nvml.gpus[0], os.getpid()):
        driver = Nvml()
        wait_until(lambda: driver.held(child.pid) is not None, "listed", seconds=60)
        held = driver.held(child.pid)
        assert held is not None
        assert held >= HELD
        full = driver.used()
        child.kill()
        wait_until(lambda: driver.held(child.pid) is None, "gone", seconds=60)
        wait_until(lambda: driver.used() <= full - HELD, "free", seconds=60)


def test_what_a_process_has_started_includes_what_that_has_started(tmp_path: Path) -> None:
    for pid, children in {1: "2 3", 2: "4", 3: "", 4: ""}.items():
        (tmp_path / str(pid) / "task" / str(pid)).mkdir(parents=True)
        (tmp_path / str(pid) / "task" / str(pid) / "children").write_text(children)
    assert sorted(descendants(1, tmp_path)) == [2, 3, 4]


def test_a_process_that_is_gone_holds_an_unknown_amount(tmp_path: Path) -> None:
    assert resident_bytes(1, tmp_path) is None


def test_paused_memory_is_given_back_and_reads_as_zero_once_it_is_there_again() -> None:
    saver = HostSaver()
    with saver.region(tag="weights"):
        inside = torch.full((HELD // 4,), 7, dtype=torch.int32)
    outside = torch.full((HELD // 4,), 7, dtype=torch.int32)
    before = _own_bytes()
    saver.pause("weights")
    assert before - _own_bytes() > HELD * 0.9
    saver.resume("weights")
    assert int(inside.sum()) == 0
    assert int(outside[0]) == 7


def _own_bytes() -> int:

    held = resident_bytes(os.getpid())
    assert held is not None
    return held
