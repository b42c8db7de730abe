"""Processes as ``/proc`` shows them: which one a pid still is, where it belongs, what it left."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_SNAPSHOT = re.compile(r"/dev/shm/sglang_loads_[\w.-]+\.shm$", re.MULTILINE)  # noqa: S108  # that is the place


def start_ticks(pid: int) -> int:
    """Start time of a process, which with the pid identifies it for ever; 0 = it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
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
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if (number == "0") if driver == "v2" else ("freezer" in controllers.split(",")):
            return path
    return ""


def shared_memory(pids: Iterable[int]) -> frozenset[Path]:
    """Load snapshots in shared memory, which a killed SGLang cannot remove itself."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
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
