"""Process trees: every driver on real processes, and the kill orders on a cgroup held in files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from rose_agent.errors import GroupError, NoFreezer
from rose_agent.host.processes import exec_engine
from rose_agent.os import freezers
from rose_agent.os.groups import SignalGroup, V1Group, V2Group, end, wait_for
from rose_agent.os.mounts import locate, parse_mountinfo
from rose_agent.os.processes import start_ticks
from rose_wire.cgroups import paths_by_controller

# Counts in a file, and has a child that does so too.
COUNTER = """
import os, sys, time
if len(sys.argv) == 2: os.fork()
path = f"{sys.argv[1]}.{os.getpid()}"
count = 0
while True:
    count += 1
    open(path, "w").write(str(count))
    time.sleep(0.002)
"""


class Tree:
    """A real two-process tree under a driver."""

    def __init__(self, driver: str, folder: Path) -> None:
        self.folder = folder
        self.freezer = freezers.detect(driver, scope=str(folder))  # type: ignore[arg-type]
        directory = self.freezer.prepare("tree")
        join = [] if directory is None else ["--procs", str(directory / "cgroup.procs")]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", exec_engine.__file__, *join, "--"),
                *(sys.executable, "-c", COUNTER, str(folder / "count")),
            ],
            start_new_session=True,
        )
        self.group = self.freezer.group("tree", self.process.pid)

    def counts(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob("count.*")}

    def move(self) -> bool:
        """Whether both processes made progress after this call."""
        before = self.counts()
        return wait_for(
            lambda: sum(self.counts().get(name) != count for name, count in before.items()) == 2,
            30.0,
        )


@pytest.fixture(params=["v2", "v1", "signals"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tree]:
    try:
        made = Tree(request.param, tmp_path)
    except NoFreezer as error:
        pytest.skip(f"needs root and a writable hierarchy: {error}")
    assert wait_for(lambda: len(made.counts()) == 2, 30.0)
    yield made
    made.group.thaw()
    end(made.group, 10.0)
    made.process.wait()


def test_a_frozen_tree_computes_nothing_and_goes_on_after_thaw(tree: Tree) -> None:
    assert len(tree.group.pids()) == 2
    assert tree.move()
    tree.group.freeze()
    assert wait_for(tree.group.is_frozen, 30.0)
    before = tree.counts()
    time.sleep(0.1)
    assert tree.counts() == before
    tree.group.thaw()
    assert not tree.group.is_frozen()
    assert tree.move()


def test_processor_time_grows_with_what_a_tree_computes_and_rests_with_it(tree: Tree) -> None:
    def used() -> int:
        found = tree.group.cpu_ns()
        assert found is not None
        return found

    before = used()
    assert wait_for(lambda: used() > before, 30.0)
    tree.group.freeze()
    assert wait_for(tree.group.is_frozen, 30.0)
    time.sleep(0.05)
    rest = used()
    time.sleep(0.2)
    assert used() == rest


def test_a_frozen_tree_is_ended_with_its_orphans(tree: Tree) -> None:
    """The root dies first: the rest belongs to the tree all the same."""
    os.kill(tree.process.pid, signal.SIGKILL)
    tree.process.wait()
    assert wait_for(lambda: len(tree.group.pids()) == 1, 30.0)
    tree.group.freeze()
    assert wait_for(tree.group.is_frozen, 30.0)
    assert end(tree.group, 30.0)
    assert tree.group.pids() == ()
    assert tree.group.directory is None or not tree.group.directory.exists()


def test_sweeps_know_the_hosts_own_cgroups_only(tree: Tree, tmp_path: Path) -> None:
    if tree.freezer.base is None:
        assert tree.freezer.strays() == ()
        return
    assert [stray.directory for stray in tree.freezer.strays()] == [tree.group.directory]
    other = freezers.detect(tree.freezer.driver, scope="another host")  # type: ignore[arg-type]
    assert tree.group.directory not in [stray.directory for stray in other.strays()]


def test_hosts_that_send_signals_know_their_cgroups_of_limits_by_names_of_their_own() -> None:
    one, other = (freezers.detect("signals", scope=scope).prefix for scope in ("/a", "/b"))
    assert not one.startswith(other)
    assert not other.startswith(one)


def test_an_engine_is_the_first_to_die_and_gains_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report"
    script = (
        "import resource;s=open('/proc/self/status').read();"
        "o=open('/proc/self/oom_score_adj').read().strip();"
        f"open({str(report)!r},'w').write(o+' '+str(resource.getrlimit(4)[0])+' '"
        "+next(l.split()[1] for l in s.splitlines() if l.startswith('NoNewPrivs')))"
    )
    command = [sys.executable, "-I", "-S", exec_engine.__file__, "--", sys.executable, "-c", script]
    subprocess.run(command, check=True, timeout=60)
    assert report.read_text() == "1000 0 1"


class Recorded:
    """Order of what is done to a cgroup that is only files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.folder = folder
        monkeypatch.setattr("rose_agent.os.groups.os.kill", self._kill)

    def _kill(self, pid: int, number: int) -> None:
        state = self.folder / "freezer.state"
        self.done.append(f"kill {pid} {state.read_text() if state.exists() else ''}".strip())
        (self.folder / "cgroup.procs").write_text("")


def test_v1_kills_before_it_thaws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(tmp_path, monkeypatch)
    (tmp_path / "cgroup.procs").write_text("11\n")
    (tmp_path / "freezer.state").write_text("FROZEN")
    V1Group(tmp_path).kill()
    assert recorded.done == ["kill 11 FROZEN"]
    assert (tmp_path / "freezer.state").read_text() == "THAWED"


def test_v2_kills_through_the_kernel_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(tmp_path, monkeypatch)
    (tmp_path / "cgroup.procs").write_text("11\n")
    V2Group(tmp_path).kill()
    assert recorded.done == ["kill 11"]
    (tmp_path / "cgroup.kill").write_text("")
    V2Group(tmp_path).kill()
    assert (tmp_path / "cgroup.kill").read_text() == "1"
    assert recorded.done == ["kill 11"]


def test_what_the_kernel_refuses_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "freezer.state").mkdir()
    with pytest.raises(GroupError, match=r"freezer\.state"):
        V1Group(tmp_path).freeze()


def test_a_tree_that_is_gone_is_frozen_and_free_of_processes(tmp_path: Path) -> None:
    for gone in (V1Group(tmp_path / "gone"), V2Group(tmp_path / "gone")):
        gone.freeze()
        assert gone.is_frozen()
        assert end(gone, 1.0)
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    assert SignalGroup(process.pid).pids() == ()
    assert start_ticks(process.pid) == 0


MOUNTINFO = """\
30 25 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 /pods/a /sys/fs/cgroup/freezer ro,nosuid - cgroup cgroup rw,freezer
32 30 0:28 /pods/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
34 30 0:27 / /host/freezer rw - cgroup cgroup rw,freezer
garbage
"""


def test_a_cgroup_is_found_where_it_is_mounted_here() -> None:
    mounts = parse_mountinfo(MOUNTINFO)
    path = PurePosixPath("/pods/a/engine")
    assert locate(mounts, 1, path) == Path("/host/freezer/pods/a/engine")
    assert locate(mounts[:1], 1, path) == Path("/sys/fs/cgroup/freezer/engine")
    assert locate(mounts, 2, path) == Path("/sys/fs/cgroup/unified/pods/a/engine")
    assert locate(mounts[:1], 1, PurePosixPath("/pods/b")) is None
    assert [mount.writable for mount in mounts] == [False, True, True, True]


def test_membership_is_read_for_both_versions() -> None:
    paths = paths_by_controller("6:freezer:/pods/a\n5:cpu,cpuacct:/b\n0::/c:d\nbad\n")
    assert paths == {
        "freezer": PurePosixPath("/pods/a"),
        "cpu": PurePosixPath("/b"),
        "cpuacct": PurePosixPath("/b"),
        "": PurePosixPath("/c:d"),
    }


def test_the_choice_of_a_driver_names_what_the_others_lack(tmp_path: Path) -> None:
    found = freezers.detect("auto", base_of=lambda _: None)
    assert found.driver == "signals"
    assert "no v2 hierarchy" in found.reason
    assert "no v1 hierarchy" in found.reason
    with pytest.raises(NoFreezer, match="no v1 hierarchy"):
        freezers.detect("v1", base_of=lambda _: None)
    with pytest.raises(NoFreezer, match=r"cgroup\.freeze is missing"):
        freezers.detect("v2", base_of=lambda _: tmp_path)
    assert list(tmp_path.iterdir()) == []
