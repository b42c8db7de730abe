"""Groups of a sandbox stand still by one hierarchy, and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_sandbox.errors import RuntimeFailed
from rose_sandbox.runtimes import processes
from rose_sandbox.runtimes.processes import freeze, thaw


def test_a_group_is_frozen_by_the_hierarchy_that_has_the_freezer(tmp_path: Path) -> None:
    """As runc looks for it: on a machine with both, the older one's."""
    older, unified = tmp_path / "freezer", tmp_path / "unified"
    for group in (older, unified):
        group.mkdir()
    (unified / "cgroup.freeze").write_text("0")
    (unified / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    freeze([older, unified])
    assert (unified / "cgroup.freeze").read_text() == "1"
    thaw([older, unified])
    assert (unified / "cgroup.freeze").read_text() == "0"
    (older / "freezer.state").write_text("THAWED")
    freeze([older, unified])
    assert (older / "freezer.state").read_text() == "FROZEN"
    assert (unified / "cgroup.freeze").read_text() == "0"


def test_a_group_that_moves_on_is_named_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FREEZE_SECONDS", 0.0)
    (tmp_path / "cgroup.freeze").write_text("0")
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    with pytest.raises(RuntimeFailed, match="does not stand still"):
        freeze([tmp_path])
    assert (tmp_path / "cgroup.freeze").read_text() == "0"
    with pytest.raises(RuntimeFailed, match="can be frozen"):
        freeze([])
