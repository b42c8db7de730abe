"""The file in which an engine says what it does, and readers that trust nothing about it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rose_core.guard.freezing import Activity
from rose_dev.waiting import wait_until
from rose_engines.node import activity
from rose_engines.node.activity import (
    ITERATING,
    RESTING,
    SIZE,
    STARTING,
    TOGETHER,
    ActivityBoard,
    read,
)
from rose_engines.node.permit import Permit
from rose_engines.sglang.checkpoints import Checkpoints


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "activity"


def test_the_numbers_are_those_of_the_decision() -> None:
    assert (STARTING, ITERATING, RESTING, TOGETHER) == (
        Activity.STARTING,
        Activity.ITERATING,
        Activity.RESTING,
        Activity.ITERATING_TOGETHER,
    )


def test_what_a_rank_says_is_read(path: Path) -> None:
    assert read(path) == 0
    board = ActivityBoard(path)
    assert read(path) == STARTING
    board.write(RESTING)
    assert read(path) == RESTING


def test_the_least_restful_rank_counts(path: Path) -> None:
    first, second = ActivityBoard(path), ActivityBoard(path)
    first.write(RESTING)
    assert read(path) == STARTING
    second.write(ITERATING)
    assert read(path) == TOGETHER
    second.write(RESTING)
    assert read(path) == RESTING


@pytest.mark.parametrize(
    "text", [b"", b"x", b"x" * SIZE, activity.MAGIC + b"\xff" * (SIZE - 8), b"\0" * (2 * SIZE)]
)
def test_a_file_that_is_not_understood_says_nothing(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    assert read(path) == 0


def test_a_reader_follows_no_link_and_waits_for_no_pipe(path: Path, tmp_path: Path) -> None:
    ActivityBoard(tmp_path / "other").write(RESTING)
    path.symlink_to(tmp_path / "other")
    assert read(path) == 0
    path.unlink()
    os.mkfifo(path)
    assert read(path) == 0


def test_a_file_that_shrinks_under_its_reader_says_nothing(path: Path) -> None:
    ActivityBoard(path)
    os.truncate(path, 8)
    assert read(path) == 0


def test_a_start_waits_at_its_checkpoint_and_says_that_it_rests(path: Path, tmp_path: Path) -> None:
    permit = Permit.create(tmp_path / "permit")
    checkpoints = Checkpoints(path, tmp_path / "permit")
    begun = threading.Thread(target=checkpoints.begin)
    begun.start()
    wait_until(lambda: read(path) == RESTING, "the word", seconds=60, pause=0.001)
    permit.extend(_far())
    begun.join(60)
    assert read(path) == STARTING
    loaded: list[int] = []
    weights = checkpoints.around_weights(lambda: iter(range(3)))
    loaded.append(next(weights))
    permit.close_now()
    rest = threading.Thread(target=lambda: loaded.extend(weights))
    rest.start()
    wait_until(lambda: read(path) == RESTING, "the word", seconds=60, pause=0.001)
    assert loaded == [0]
    permit.extend(_far())
    rest.join(60)
    assert (loaded, read(path)) == ([0, 1, 2], STARTING)


def test_where_nobody_asked_nothing_is_written_and_nothing_waits(tmp_path: Path) -> None:
    Permit.create(tmp_path / "permit")
    silent = Checkpoints(None, tmp_path / "permit")
    silent.begin()
    assert list(silent.around_weights(lambda: iter([1, 2]))) == [1, 2]
    silent.mark_resting()
    assert [one.name for one in tmp_path.iterdir()] == ["permit"]


def _far() -> int:
    return time.monotonic_ns() + 9_000_000_000
