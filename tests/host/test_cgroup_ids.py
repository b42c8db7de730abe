"""Cgroups found through another cgroup namespace, in a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rose_agent.os import freezers
from rose_agent.os.cgroup_ids import search, through_the_node
from rose_agent.os.find_group import find_group
from rose_agent.os.mounts import parse_mountinfo
from rose_engines.node.rundir import EngineFile

LINE = "34 30 0:28 {root} {point} {mode} - cgroup2 cgroup2 rw\n"


def mounted(point: Path, root: str = "/../..", mode: str = "rw") -> str:
    return LINE.format(root=root, point=point, mode=mode)


def made(tmp_path: Path) -> Path:
    folder = tmp_path / "kubepods" / "pod" / "container" / "rose-x"
    folder.mkdir(parents=True)
    return folder


def test_a_folder_is_found_by_its_number_alone(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert search(tmp_path, folder.stat().st_ino) == folder
    assert search(tmp_path, 1) is None


def test_only_a_writable_mount_from_outside_the_namespace_is_searched(tmp_path: Path) -> None:
    folder = made(tmp_path)
    number = folder.stat().st_ino
    assert through_the_node(parse_mountinfo(mounted(tmp_path)), number) == folder
    assert through_the_node(parse_mountinfo(mounted(tmp_path, root="/")), number) is None
    assert through_the_node(parse_mountinfo(mounted(tmp_path, mode="ro")), number) is None


def test_a_folder_that_is_made_anew_is_not_mixed_up(tmp_path: Path) -> None:
    folder = made(tmp_path)
    number, mounts = folder.stat().st_ino, parse_mountinfo(mounted(tmp_path))
    assert through_the_node(mounts, number) == folder
    folder.rename(moved := folder.with_name("rose-y"))
    assert through_the_node(mounts, number) == moved


def test_the_guard_finds_an_engine_whose_path_means_nothing_to_it(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (mountinfo := tmp_path / "mountinfo").write_text(mounted(tmp_path))
    number = folder.stat().st_ino
    record = EngineFile(
        *("uid", 1),
        cgroup="/nowhere/rose-x",
        cgroup_version="v2",
        cgroup_path="/rose-x",
        cgroup_number=number,
    )
    found = find_group(record, mountinfo)
    assert found is not None
    assert found.directory == folder
    foreign = msgspec.structs.replace(record, cgroup_number=folder.parent.stat().st_ino)
    assert find_group(foreign, mountinfo) is None, "not an engine's"
    # Where both mount the hierarchy at one place nothing is searched.
    mountinfo.write_text("")
    same = EngineFile(
        "uid", 1, cgroup=str(folder), cgroup_version="v2", cgroup_path="/a", cgroup_number=number
    )
    found = find_group(same, mountinfo)
    assert found is not None
    assert found.directory == folder


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A v2 cgroup two levels below the root of the hierarchy."""
    top = freezers.own_base(2)
    if os.geteuid() != 0 or top is None or not os.access(top, os.W_OK):
        pytest.skip("needs root and a cgroup v2 hierarchy")
    folder = top / f"rose-numbers-{os.getpid()}" / "container"
    folder.mkdir(parents=True)
    yield folder
    for left in sorted(folder.parent.rglob("rose-*"), reverse=True):
        if left.is_dir():
            left.rmdir()
    folder.rmdir()
    folder.parent.rmdir()


# The namespace's own mount is read-only, as an ordinary container's; no right to mount is left.
INSIDE = r"""
set -e
echo 0 > {cgroup}/cgroup.procs
exec unshare --cgroup --mount sh -ec '
mkdir {folder}/node {folder}/own
mount --bind {top} {folder}/node
mount -t cgroup2 none {folder}/own
for old in $(awk "/cgroup2/ && \$5 != \"{folder}/node\" && \$5 != \"{folder}/own\" {{print \$5}}" \
    /proc/self/mountinfo); do umount --lazy $old; done
mount -o remount,bind,ro {folder}/own
exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin {python} {folder}/inside.py
'
"""
CODE = """
from rose_agent.os.freezers import detect
found = detect("v2")
print(found.base, found.prepare("x"))
found.group("x", 0).freeze()
"""


def test_a_host_with_no_right_to_mount_makes_cgroups_through_the_nodes_hierarchy(
    cgroup: Path, tmp_path: Path
) -> None:
    top = cgroup.parent.parent
    words = {"cgroup": cgroup, "top": top, "folder": tmp_path, "python": sys.executable}
    (tmp_path / "inside.py").write_text(CODE)
    script = INSIDE.format(**words)
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    base, made_there = map(Path, done.stdout.split())
    assert base == tmp_path / "node" / cgroup.relative_to(top)
    assert made_there.parent == base
    (frozen,) = (path / "cgroup.freeze" for path in cgroup.iterdir() if path.is_dir())
    assert frozen.read_text().strip() == "1"
