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

ROOT = Path("/sys/fs/cgroup")


def hierarchies(root: Path = ROOT) -> list[Path]:
    """Mount points that can hold the node's trees."""
    if (root / "cgroup.controllers").exists():
        return [root]
    found = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted(path for path in found if (path / "cgroup.procs").exists())


def make(name: str, root: Path = ROOT) -> None:
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


def trees(name: str, root: Path = ROOT) -> list[Path]:
    """The existing trees of that name."""
    return [path / name for path in hierarchies(root) if (path / name).is_dir()]


def _folders(tree: Path) -> Iterator[Path]:
    """The tree's folders, parents first; folders that vanish meanwhile are skipped."""
    for folder, _, _ in os.walk(tree):
        yield Path(folder)


def thaw(name: str, root: Path = ROOT) -> int:
    """Thaw everything below the trees, parents first.

    Returns:
        How many cgroups were frozen.
    """
    thawed = 0
    for tree in trees(name, root):
        for folder in _folders(tree):
            for file, frozen, running in (
                ("freezer.state", "FROZEN", "THAWED"),
                ("cgroup.freeze", "1", "0"),
            ):
                with suppress(OSError):
                    if (folder / file).read_text().strip() == frozen:
                        (folder / file).write_text(running)
                        thawed += 1
    return thawed


def members(name: str, root: Path = ROOT) -> set[int]:
    """Processes in any of the trees."""
    found: set[int] = set()
    for tree in trees(name, root):
        for folder in _folders(tree):
            with suppress(OSError):
                found.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
    return found


def kill(name: str, root: Path = ROOT) -> None:
    """Thaw and kill every process in the trees, once; the caller repeats until none is left."""
    thaw(name, root)
    for pid in members(name, root) - {0, os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove(name: str, *, seconds: float = 20, root: Path = ROOT) -> list[Path]:
    """Remove the empty trees; a cgroup whose last task has just died is busy for a moment.

    Returns:
        What could not be removed in time.
    """
    deadline = time.monotonic() + seconds
    while left := trees(name, root):
        for tree in left:
            for folder in reversed(list(_folders(tree))):
                with suppress(OSError):
                    folder.rmdir()
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return trees(name, root)
