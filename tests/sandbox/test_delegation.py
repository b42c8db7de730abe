"""A host in a container makes room for its sandboxes' groups beside its own processes."""

from __future__ import annotations

from pathlib import Path

from rose_sandbox.runtimes.processes import delegate


def test_the_containers_processes_move_aside_and_controllers_are_handed_on(tmp_path: Path) -> None:
    (tmp_path / "cgroup.type").write_text("domain\n")
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.procs").write_text("7\n")
    (tmp_path / "host").mkdir()
    delegate(tmp_path)
    assert (tmp_path / "host" / "cgroup.procs").read_text() == "7"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_a_machines_own_top_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    delegate(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["cgroup.controllers"]
