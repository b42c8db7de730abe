"""Stop, continue and end a whole engine process tree: the interface and its three drivers.

| driver  | stop                | end (order matters)                                         |
|---------|---------------------|-------------------------------------------------------------|
| v2      | ``cgroup.freeze``   | ``cgroup.kill``, which also ends frozen tasks               |
| v1      | ``freezer.state``   | SIGKILL to every task, *then* thaw: a frozen task ignores it |
| signals | SIGSTOP             | SIGKILL, which also ends stopped processes                  |

The two cgroup drivers cover processes that were born meanwhile and can be read back; the third
walks ``/proc`` and is for machines where no cgroup may be written. ``freezers`` chooses one.
Members are always read from ``cgroup.procs``, never from the parent tree: a process whose parent
died belongs to the engine all the same. Next step: ``enforcer`` stops and continues trees,
``repair`` ends those of an earlier host.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from rose_agent.errors import GroupError
from rose_wire import cgroups
from rose_wire.cgroups import V1, V2

# Pause between two looks at a tree that is on its way to a state.
_POLL_SECONDS = 0.001
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# utime, stime, cutime, cstime among what follows the command's name in /proc/PID/stat, proc(5).
_TIMES = slice(11, 15)


class ProcessGroup(Protocol):
    """An engine's process tree."""

    @property
    def driver(self) -> str:
        """``v1``, ``v2`` or ``signals``."""

    @property
    def directory(self) -> Path | None:
        """The cgroup's folder here; None for ``signals``."""

    def pids(self) -> tuple[int, ...]:
        """Processes that belong to the tree now."""

    def freeze(self) -> None:
        """Ask every thread to stop; ``is_frozen`` tells when they have.

        Raises:
            GroupError: the kernel refused.
        """

    def thaw(self) -> None:
        """Let every thread go on.

        Raises:
            GroupError: the kernel refused.
        """

    def is_frozen(self) -> bool:
        """True once every thread stands still; also for a tree without processes."""

    def cpu_ns(self) -> int | None:
        """Processor time that the tree has used so far; None when it cannot be known."""

    def kill(self) -> None:
        """Order the end of every process, in the order the driver needs.

        Raises:
            GroupError: the kernel refused.
        """

    def remove(self) -> None:
        """Forget an empty tree; a cgroup folder is removed."""


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds.

    Returns:
        False when it did not inside ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def end(group: ProcessGroup, seconds: float) -> bool:
    """Kill until the tree is empty; processes that fork meanwhile are met in the next round.

    Returns:
        False when something still lives after ``seconds``.

    Raises:
        GroupError: the kernel refused.
    """
    deadline = time.monotonic() + seconds
    while group.pids():
        group.kill()
        if wait_for(lambda: not group.pids(), 0.05):
            break
        if time.monotonic() > deadline:
            return False
    group.remove()
    return True


class _Task(NamedTuple):
    """A line of ``/proc/PID/stat``, as far as it matters here."""

    state: str
    parent: int
    session: int


def _tasks() -> dict[int, _Task]:
    """Every process that is no zombie; one that ends meanwhile is not in it."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # hot: a tree is looked at many times a second
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123  # as above
                # The command may hold blanks and brackets; fields count after its closing one.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        state = fields[0].decode()
        if state not in "ZX":
            found[int(name)] = _Task(state, int(fields[1]), int(fields[3]))
    return found


def _cpu_ns(pids: Iterable[int]) -> int | None:
    """Processor time of processes and of their dead children, as ``/proc`` has it."""
    ticks = 0
    for pid in pids:
        if not pid:
            return None  # of another pid namespace
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended; what it used shows in its parent
        ticks += sum(map(int, fields[_TIMES]))
    return ticks * 1_000_000_000 // _TICKS_PER_SECOND


class _Cgroup:
    """What v1 and v2 share: a folder with ``cgroup.procs``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def directory(self) -> Path:
        """The cgroup's folder here."""
        return self._directory

    def pids(self) -> tuple[int, ...]:
        """Processes that belong to the cgroup; 0 stands for one of another pid namespace."""
        return cgroups.members(self._directory)

    def remove(self) -> None:
        """Remove the folder; on a busy machine the last exit may take the kernel seconds.

        What cannot be removed stays as an empty cgroup, which the next host's repair removes.
        """
        wait_for(lambda: cgroups.remove(self._directory), 5.0)

    def _write(self, name: str, text: str) -> None:
        path = self._directory / name
        try:
            path.write_text(text)
        except FileNotFoundError:
            return  # the tree is gone, and with it what was to be stopped
        except OSError as error:
            message = f"cannot write {text!r} to {path}: {error.strerror}"
            raise GroupError(message) from error

    def _read(self, name: str) -> str:
        return cgroups.text_of(self._directory / name)


class V1Group(_Cgroup):
    """A cgroup of the v1 freezer."""

    driver = "v1"

    def freeze(self) -> None:
        """Ask for FROZEN."""
        self._write(V1.control, V1.freeze)

    def thaw(self) -> None:
        """Ask for THAWED."""
        self._write(V1.control, V1.thaw)

    def is_frozen(self) -> bool:
        """Read the state back; FREEZING is not yet."""
        return self._read(V1.state).strip() in {V1.frozen, ""}

    def cpu_ns(self) -> int | None:
        """The sum over its processes: the freezer's hierarchy counts no time."""
        return _cpu_ns(self.pids())

    def kill(self) -> None:
        """SIGKILL first, so that a thawed task has nothing left to run."""
        cgroups.signal_all(self.pids(), signal.SIGKILL)
        self.thaw()


class V2Group(_Cgroup):
    """A cgroup of the unified hierarchy."""

    driver = "v2"

    def freeze(self) -> None:
        """Set ``cgroup.freeze``."""
        self._write(V2.control, V2.freeze)

    def thaw(self) -> None:
        """Clear ``cgroup.freeze``."""
        self._write(V2.control, V2.thaw)

    def is_frozen(self) -> bool:
        """Read ``cgroup.events``; an empty cgroup has nothing that could run."""
        return V2.is_frozen(self._directory) or not self.pids()

    def cpu_ns(self) -> int | None:
        """``cpu.stat``, which the unified hierarchy keeps with or without the controller."""
        parts = self._read("cpu.stat").split()
        if "usage_usec" not in parts:
            return None
        return int(parts[parts.index("usage_usec") + 1]) * 1000

    def kill(self) -> None:
        """``cgroup.kill`` where the kernel has it (5.14), else SIGKILL to every task."""
        if (self._directory / "cgroup.kill").exists():
            self._write("cgroup.kill", "1")
        else:
            cgroups.signal_all(self.pids(), signal.SIGKILL)
        self.thaw()


class SignalGroup:
    """A session of processes, stopped one by one; the weakest driver.

    Members are the processes of the leader's session and their descendants. A process that makes
    a session of its own *and* loses its parent escapes, which is why cgroups are preferred.
    """

    driver = "signals"
    directory: Path | None = None

    def __init__(self, leader: int) -> None:
        self._leader = leader

    def pids(self) -> tuple[int, ...]:
        """Every living member, zombies not counted."""
        return tuple(sorted(self._members()))

    def _members(self) -> dict[int, _Task]:
        """Pid -> task of every member: the session, and all that descend from it."""
        tasks = _tasks()
        members = {pid for pid, task in tasks.items() if self._leader in {task.session, pid}}
        grown = True
        while grown:
            born = {pid for pid, task in tasks.items() if task.parent in members} - members
            members |= born
            grown = bool(born)
        return {pid: tasks[pid] for pid in members}

    def freeze(self) -> None:
        """SIGSTOP until a round finds no new member."""
        stopped: set[int] = set()
        while fresh := set(self.pids()) - stopped:
            cgroups.signal_all(fresh, signal.SIGSTOP)
            stopped |= fresh

    def thaw(self) -> None:
        """SIGCONT."""
        cgroups.signal_all(self.pids(), signal.SIGCONT)

    def is_frozen(self) -> bool:
        """True when every member is in the stopped state."""
        return all(task.state in "Tt" for task in self._members().values())

    def cpu_ns(self) -> int | None:
        """The sum over its processes."""
        return _cpu_ns(self.pids())

    def kill(self) -> None:
        """SIGKILL; a stopped process does not survive it."""
        cgroups.signal_all(self.pids(), signal.SIGKILL)

    def remove(self) -> None:
        """Nothing is left of a session."""
