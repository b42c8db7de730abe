"""The node's tmpfs is full: what exists goes on, what is new is refused, and it heals by itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_agent.guard.loop import Guard, load_guard_file
from rose_core.wire.sync import SyncReply
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import RunDir
from tests.agent.test_guard import GRANT, POLICY, guard, health, is_open

__all__ = ["guard"]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of a few pages, all of them taken by ``ballast``."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {made.stderr.strip()}")
    try:
        fill(folder / "ballast")
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


async def test_a_guard_that_cannot_save_goes_on_and_saves_later(
    guard: tuple[Guard, Permit], full: Path
) -> None:
    made, permit = guard
    made.rundir = RunDir(full)
    made.on_reply(SyncReply(7, True, (GRANT,), (POLICY,)), time.monotonic())
    made.on_tap([health()], time.monotonic_ns())
    assert is_open(permit), "serving is as safe as before, lending goes on"
    assert made.grants.highest_term == 7
    (entry,) = [entry for entry in made.recorder.entries() if entry[2] == "unsaved"]
    assert "No space left" in entry[3]["problem"]
    (full / "ballast").unlink()
    made.on_reply(SyncReply(7, True, (GRANT,), (POLICY,)), time.monotonic())
    assert load_guard_file(made.rundir.guard).highest_term == 7


def test_no_permit_is_made_and_no_draft_stays(full: Path) -> None:
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            Permit.create(full / "permit")
    assert [path.name for path in full.iterdir()] == ["ballast"]
    (full / "ballast").unlink()
    permit = Permit.create(full / "permit")
    assert permit.until_ns == 0
    permit.detach()


def test_a_mapped_permit_closes_whatever_the_folder_holds(full: Path) -> None:
    (full / "ballast").unlink()
    permit = Permit.create(full / "permit")
    fill(full / "ballast")
    permit.extend(2**40)
    permit.close_now()
    assert permit.until_ns == 0
    permit.detach()
