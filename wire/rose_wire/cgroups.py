"""Control groups of Linux by their folders: where they lie, who is in them, how they stand still.

| version | hierarchies | stands still by | reads as |
|---|---|---|---|
| v1 | one for each controller | ``freezer.state`` | ``FROZEN`` |
| v2 | one for all | ``cgroup.freeze`` | ``frozen 1`` in ``cgroup.events`` |

A frozen task of v1 ignores even SIGKILL until it is thawed. Standard library only. The engine host
(``rose_agent.os.groups``), sandboxes (``rose_sandbox.runtimes.processes``) and the development node
(``rose_dev.cluster.cgroups``) build on this what each of them promises.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

TOP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CgroupFreezer:
    """The files by which groups of one version are frozen.

    Attributes:
        control: takes ``freeze`` and ``thaw``.
        state: has the line ``frozen`` once every thread stands still.
    """

    control: str
    freeze: str
    thaw: str
    state: str
    frozen: str

    def controls(self, group: Path) -> bool:
        """Whether the group can be frozen by these files."""
        return (group / self.control).exists()

    def is_frozen(self, group: Path) -> bool:
        """Whether every thread of the group stands still; false where that cannot be read."""
        return self.frozen in text_of(group / self.state).splitlines()


V1 = CgroupFreezer("freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN")
V2 = CgroupFreezer("cgroup.freeze", "1", "0", "cgroup.events", "frozen 1")
FREEZERS = (V1, V2)
"""As runc looks for them: on a machine with both, by the older one's."""


def text_of(path: Path) -> str:
    """A file of the kernel's as text; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def is_unified(top: Path = TOP) -> bool:
    """Whether all controllers of this machine are in one hierarchy."""
    return (top / "cgroup.controllers").exists()


def hierarchies(top: Path = TOP) -> list[Path]:
    """Where groups of this machine lie: one folder, or one for each controller."""
    if is_unified(top):
        return [top]
    folders = (path for path in top.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in folders if (path / "cgroup.procs").exists())


def paths_by_controller(text: str) -> dict[str, PurePosixPath]:
    """Read ``/proc/PID/cgroup``: controller name -> path of the group; v2 is the empty name."""
    paths: dict[str, PurePosixPath] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = PurePosixPath(parts[2])
    return paths


def members(group: Path) -> tuple[int, ...]:
    """Processes of the group now, without groups below it.

    Returns:
        Process ids; 0 stands for a process of another pid namespace. Empty for no such group.
    """
    return tuple(int(line) for line in text_of(group / "cgroup.procs").split())


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal; one that has ended meanwhile is no error, and nobody is signalled for 0.

    Raises:
        PermissionError: one of them is another user's.
    """
    for pid in pids:
        if pid:  # a signal to 0 would be for our own process group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def remove(group: Path) -> bool:
    """Remove a group without members once; whether it is gone.

    A group whose last task has just died is busy for a moment: callers try again.
    """
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
