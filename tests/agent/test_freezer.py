"""What the guard does to a tree itself, and when it leaves it to come to rest."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rose_agent.guard.slots import freezer
from rose_agent.os.groups import wait_for
from rose_agent.os.processes import pid_namespace, start_ticks
from rose_core.guard.freezing import Grace
from rose_engines.node.activity import ITERATING, RESTING, ActivityBoard
from rose_engines.node.rundir import EngineFile, RunDir, SlotDir, write_json

LATE_NS = Grace().start_ns


@pytest.fixture
def rundir() -> Iterator[RunDir]:
    """Short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    yield RunDir(folder).create()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slot(rundir: RunDir) -> Iterator[tuple[SlotDir, psutil.Process]]:
    """A slot whose engine is a process of its own session."""
    folder = rundir.slot("slot-1").create()
    engine = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    ticks = start_ticks(engine.pid)
    record = EngineFile(
        "slot-1", pids=(engine.pid,), pid_namespace=pid_namespace(), start_ticks=ticks
    )
    write_json(folder.engine, record)
    try:
        yield folder, psutil.Process(engine.pid)
    finally:
        engine.kill()
        engine.wait()


def test_an_engine_that_says_nothing_is_frozen_at_once(
    slot: tuple[SlotDir, psutil.Process],
) -> None:
    folder, _engine = slot
    assert freezer.freeze(folder, 0) == ""
    assert wait_for(lambda: freezer.is_frozen(folder), 30.0)


def test_an_engine_that_loads_is_left_alone_also_when_its_host_is_gone(
    slot: tuple[SlotDir, psutil.Process],
) -> None:
    folder, engine = slot
    board = ActivityBoard(folder.activity)
    assert "checkpoint" in freezer.freeze(folder, LATE_NS - 1, hurried=True)
    assert engine.status() != psutil.STATUS_STOPPED
    board.write(RESTING)
    assert freezer.freeze(folder, 0) == ""
    assert wait_for(lambda: freezer.is_frozen(folder), 30.0)


def test_an_engine_that_loads_and_never_rests_is_ended(
    slot: tuple[SlotDir, psutil.Process],
) -> None:
    folder, engine = slot
    ActivityBoard(folder.activity)
    assert freezer.freeze(folder, LATE_NS, hurried=True) == ""
    assert wait_for(lambda: engine.status() == psutil.STATUS_ZOMBIE, 30.0)


def test_an_iteration_has_no_grace_when_the_host_is_gone(
    slot: tuple[SlotDir, psutil.Process],
) -> None:
    folder, engine = slot
    ActivityBoard(folder.activity).write(ITERATING)
    assert "rests" in freezer.freeze(folder, 0)
    assert engine.status() != psutil.STATUS_STOPPED
    assert freezer.freeze(folder, 0, hurried=True) == ""
    assert wait_for(lambda: freezer.is_frozen(folder), 30.0)


def test_a_slot_without_a_tree_says_so(rundir: RunDir) -> None:
    folder = rundir.slot("slot-2").create()
    assert "no process tree" in freezer.freeze(folder, 0)
    assert "no process tree" in freezer.kill(folder)
