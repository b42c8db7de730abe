"""The node's cgroup trees: make them, thaw them, empty them, remove them.

With cgroup v1 every controller has a tree of its own under /sys/fs/cgroup/CONTROLLER; with v2 there
is one. A frozen task ignores even SIGKILL with v1, so everything is thawed before it is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rose_wire.cgroups import FREEZERS, TOP, hierarchies, signal_all
from rose_wire.cgroups import members as of
from rose_wire.cgroups import remove as remove_folder

# Pods mostly wait for each other. Where tests compute beside the node, all of its pods together
# would have the share of one session among theirs, and an engine took minutes to start.
_WEIGHTS = {"cpu.shares": "16384", "cpu.weight": "1600"}  # v1, v2: 16 times the default


def make(name: str, root: Path = TOP) -> None:
    """Create the tree ``name`` in every hierarchy, ready to hold pods.

    Raises:
        OSError: the file system is read-only or a controller is missing.
    """
    for hierarchy in hierarchies(root):
        tree = hierarchy / name
        tree.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # v1: empty means nothing may run
            if hierarchy.name == "cpuset" and (hierarchy / setting).exists():
                (tree / setting).write_text((hierarchy / setting).read_text())
        if hierarchy == root:
            enable = (root / "cgroup.controllers").read_text().split()
            text = " ".join(f"+{controller}" for controller in enable)
            for parent in (root, tree):
                (parent / "cgroup.subtree_control").write_text(text)


def prefer(name: str, root: Path = TOP) -> None:
    """Let the pods of the tree compute before what is beside them.

    For tests alone: where latencies are measured, who measures them is beside the pods.
    """
    for tree in trees(name, root):
        for setting, weight in _WEIGHTS.items():
            if (tree / setting).exists():
                (tree / setting).write_text(weight)


def trees(name: str, root: Path = TOP) -> list[Path]:
    """The existing trees of that name."""
    return [path / name for path in hierarchies(root) if (path / name).is_dir()]


def _folders(tree: Path) -> Iterator[Path]:
    """The tree's folders, parents first; folders that vanish meanwhile are skipped."""
    for folder, _, _ in os.walk(tree):
        yield Path(folder)


def thaw(name: str, root: Path = TOP) -> int:
    """Thaw everything below the trees, parents first.

    Returns:
        How many cgroups were frozen.
    """
    thawed = 0
    for tree in trees(name, root):
        for folder in _folders(tree):
            for freezer in FREEZERS:
                control = folder / freezer.control
                with suppress(OSError):
                    if control.read_text().strip() == freezer.freeze:
                        control.write_text(freezer.thaw)
                        thawed += 1
    return thawed


def members(name: str, root: Path = TOP) -> set[int]:
    """Processes in any of the trees."""
    return {pid for tree in trees(name, root) for folder in _folders(tree) for pid in of(folder)}


def kill(name: str, root: Path = TOP) -> None:
    """Thaw and kill every process in the trees, once; the caller repeats until none is left."""
    thaw(name, root)
    signal_all(members(name, root) - {os.getpid()}, signal.SIGKILL)


def remove(name: str, *, seconds: float = 20, root: Path = TOP) -> list[Path]:
    """Remove the empty trees; a cgroup whose last task has just died is busy for a moment.

    Returns:
        What could not be removed in time.
    """
    deadline = time.monotonic() + seconds
    while left := trees(name, root):
        for tree in left:
            for folder in reversed(list(_folders(tree))):
                remove_folder(folder)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return trees(name, root)
