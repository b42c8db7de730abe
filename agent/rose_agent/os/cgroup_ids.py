"""A cgroup by its number, where its path means nothing.

A container on a node with cgroup v2 has a cgroup namespace: its own cgroup is called ``/`` there,
and nothing says where that is. The node's hierarchy, mounted into it, shows a root of ``/../..``.
What is the same everywhere is the number of the folder, the kernel's id of the cgroup. Next step:
``freezers.own_base`` finds the host's own, ``repair.find_group`` an engine's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from rose_agent.os.mounts import CgroupMount, hierarchy

# Deeper than any container runtime puts a container's own cgroups.
_LEVELS = 10
_AGAIN_SECONDS = 1.0
_MOST = 256
_known: dict[tuple[Path, int], tuple[Path | None, float]] = {}


def through_the_node(mounts: Iterable[CgroupMount], number: int) -> Path | None:
    """The folder of a v2 cgroup in the node's own hierarchy.

    Args:
        mounts: of this process.
        number: inode of the cgroup's folder, in whatever mount.

    Returns:
        None where the node's hierarchy is not mounted writable from outside this namespace, or has
        no such cgroup.
    """
    outer = (m.point for m in hierarchy(mounts, 2) if m.writable and ".." in m.root.parts)
    for point in outer:
        found = _remembered(point, number)
        if found is not None:
            return found
    return None


def _remembered(point: Path, number: int) -> Path | None:
    """A search walks the node's whole tree: what was not there is looked for once a second."""
    now_s = time.monotonic()
    path, looked_s = _known.get((point, number), (None, 0.0))
    if path is not None and _still(path, number):
        return path
    if path is None and looked_s and now_s - looked_s < _AGAIN_SECONDS:
        return None
    if len(_known) >= _MOST:
        _known.clear()
    found = search(point, number)
    _known[point, number] = (found, now_s)
    return found


def _still(path: Path, number: int) -> bool:
    """A folder of the same name may have been made since."""
    with contextlib.suppress(OSError):
        return path.stat().st_ino == number
    return False


def search(top: Path, number: int) -> Path | None:
    """The folder with this number, level by level; one that vanishes meanwhile is passed over."""
    level = [str(top)]
    for _ in range(_LEVELS):
        deeper: list[str] = []
        for folder in level:
            for path, inode in _folders(folder):
                if inode == number:
                    return Path(path)
                deeper.append(path)
        level = deeper
    return None


def _folders(folder: str) -> list[tuple[str, int]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [
            (entry.path, entry.inode()) for entry in entries if entry.is_dir(follow_symlinks=False)
        ]
    return []
