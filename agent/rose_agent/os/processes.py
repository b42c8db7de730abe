"""Processes as ``/proc`` shows them: which one a pid still is, where it belongs, what it left.

The kernel writes these files, and yet much of them is a process's own word: its name is any 15
bytes, paths of cgroups and of mappings are any bytes, and there may be very many. ``proc_text``
reads them all: bounded, and whatever is no UTF-8 is replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
_SNAPSHOT = re.compile(r"/dev/shm/sglang_loads_[\w.-]+\.shm$", re.MULTILINE)  # noqa: S108  # that is the place
# Paths of cgroups are the longest, 4 KiB for each of a dozen hierarchies; ``mountinfo`` is our own.
_LONGEST = 1 << 20
# A scheduler has some 2,000 mappings of 100 bytes; a process may have 65,530 of 4 KiB.
LONGEST_MAPS = 8 << 20


def proc_text(pid: int | str, name: str, *, proc: Path = PROC, most: int = _LONGEST) -> str:
    """The beginning of ``/proc/PID/name``, whatever bytes the process has put there.

    Args:
        pid: the process.
        name: ``status``, ``comm``, ``cgroup`` and the like.
        proc: root of the proc file system.
        most: bytes that are read.

    Raises:
        OSError: the process has ended, or is hidden.
    """
    # Joined as text and not as paths: the guard reads some files of each process of a pod.
    with open(f"{proc}/{pid}/{name}", "rb") as file:  # noqa: PTH123  # hot path
        return file.read(most).decode("utf-8", "replace")


def start_ticks(pid: int) -> int:
    """Start time of a process, which with the pid identifies it for ever; 0 = it is gone."""
    try:
        text = proc_text(pid, "stat")
    except OSError:
        return 0
    # The command may hold blanks and brackets; fields are counted after its closing one.
    return int(text.rpartition(")")[2].split()[19])


def pid_namespace() -> int:
    """Inode of our pid namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


def kernel_path(pid: int, driver: str) -> str:
    """A process's cgroup as the kernel names it; empty when it is gone."""
    try:
        text = proc_text(pid, "cgroup")
    except OSError:
        return ""
    for line in filter(None, text.split("\n")):
        number, controllers, path = line.split(":", 2)
        if (number == "0") if driver == "v2" else ("freezer" in controllers.split(",")):
            return path
    return ""


def shared_memory(pids: Iterable[int]) -> frozenset[Path]:
    """Load snapshots in shared memory, which a killed SGLang cannot remove itself."""
    found = set()
    for pid in pids:
        try:
            maps = proc_text(pid, "maps", most=LONGEST_MAPS)
        except OSError:
            continue
        found |= set(_SNAPSHOT.findall(maps))
    return frozenset(map(Path, found))


def reap(pids: Iterable[int]) -> None:
    """Collect dead members: in a container, orphans become children of the host."""
    for pid in pids:
        # 0 stands for a process of another pid namespace; others have another parent.
        if pid > 0:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
