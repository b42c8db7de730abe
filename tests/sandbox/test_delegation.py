"""A host in a container makes room for its sandboxes' groups beside its own processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose_sandbox.runtimes.processes import BESIDE, delegate, empty, group_of
from rose_wire.cgroups import hierarchies

POD = "kubepods.slice/pod-1/container-1"


def group(folder: Path, pids: str = "7\n") -> Path:
    """A group as in the kernel's file system, with a place for those who move aside."""
    (folder / BESIDE).mkdir(parents=True)
    (folder / "cgroup.type").write_text("domain\n")
    (folder / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (folder / "cgroup.procs").write_text(pids)
    return folder


def is_delegated(folder: Path) -> bool:
    made = folder / "cgroup.subtree_control"
    return made.exists() and made.read_text() == "+cpu +memory +pids"


def test_the_containers_processes_move_aside_and_controllers_are_handed_on(tmp_path: Path) -> None:
    group(tmp_path)
    assert delegate(tmp_path, "", contained=True) == ""
    assert (tmp_path / BESIDE / "cgroup.procs").read_text() == "7"
    assert is_delegated(tmp_path)


def test_in_a_privileged_container_the_group_is_its_own_and_not_the_nodes_top(
    tmp_path: Path,
) -> None:
    """It sees all of the node's; the pod's limit holds what is below the pod."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    own = group(tmp_path / POD)
    assert delegate(tmp_path, POD, contained=True) == POD
    assert is_delegated(own)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "cgroup.controllers",
        "kubepods.slice",
    ]
    assert delegate(tmp_path, f"{POD}/{BESIDE}", contained=True) == POD, "a second start"


def test_a_top_that_is_the_containers_own_group_under_another_name_is_taken(tmp_path: Path) -> None:
    group(tmp_path)
    assert delegate(tmp_path, POD, contained=True) == ""
    assert is_delegated(tmp_path)


def test_processes_of_other_namespaces_are_not_moved(tmp_path: Path) -> None:
    """They read as 0, which would move this process."""
    group(tmp_path, "0\n")
    delegate(tmp_path, "", contained=True)
    assert not (tmp_path / BESIDE / "cgroup.procs").exists()


def test_a_machines_own_top_and_its_own_processes_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    delegate(tmp_path, "", contained=True)
    assert [one.name for one in tmp_path.iterdir()] == ["cgroup.controllers"]
    session = group(tmp_path / "user.slice")
    assert delegate(tmp_path, "user.slice", contained=False) == ""
    assert not is_delegated(session)
    assert hierarchies(tmp_path) == [tmp_path]


def test_hosts_in_pods_of_one_node_have_groups_of_their_own() -> None:
    """Their folder has the same path in every pod."""
    folder = Path("/sandboxes/runc")
    assert len({group_of(folder, one) for one in (None, 1, 2)}) == 3
    assert group_of(folder) == group_of(folder), "a host that starts again finds its own"


def test_to_empty_a_group_of_foreign_processes_signals_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read as 0, and signal 9 to process 0 ends the host itself."""
    received: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _signal: received.append(pid))
    # It gives up after one look: nothing here ever empties the group.
    monkeypatch.setattr("rose_sandbox.runtimes.processes.EMPTY_SECONDS", 0.0)
    (tmp_path / "cgroup.procs").write_text("0\n0\n7\n")
    empty([tmp_path])
    assert set(received) == {7}
