"""Processes of sandboxes, by what ``/proc`` says, and the groups that they are in.

Next step: ``runc`` ends and freezes them.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rose_sandbox.errors import RuntimeFailed
from rose_wire.cgroups import (
    FREEZERS,
    TOP,
    is_unified,
    members,
    paths_by_controller,
    remove,
    signal_all,
    text_of,
)

BESIDE = "rose-host"
"""The group of a container's own processes, beside those of its sandboxes."""
_MACHINES_OWN = 0xEFFFFFFC
"""``PROC_PID_INIT_INO``: every kernel's first namespace of process ids has this number."""
FREEZE_SECONDS = 10.0
"""A process that waits for its disk stands still when the disk has answered."""
EMPTY_SECONDS = 10.0
"""A killed process is gone when what it last asked of the kernel is done; runc waits as long."""
POLL_SECONDS = (0.002, 0.03)
"""The first and the longest pause between two looks."""


@dataclass(frozen=True)
class Stat:
    """A process, by numbers of the host; ``started`` in ticks since the machine did."""

    parent: int
    session: int
    started: int


def stat_of(pid: int) -> Stat | None:
    """None: it has ended."""
    fields = text_of(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()
    return Stat(int(fields[1]), int(fields[3]), int(fields[19])) if fields else None


def inner_pid(pid: int) -> int | None:
    """A process's id in its own sandbox."""
    found = re.search(r"^NSpid:.*\s(\d+)$", text_of(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return int(found[1]) if found else None


def ticks() -> int:
    """Now, as ``Stat.started`` counts."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def stop_anew(pids: Sequence[int]) -> None:
    """Let stopped processes of a frozen group be stopped by a signal that waits for them.

    CRIU would wait for ever for a process that is stopped and frozen at once. None of them runs in
    between: the group is frozen.
    """
    for pid in pids:
        stat_line = text_of(Path(f"/proc/{pid}/status"))
        if re.search(r"^State:\s+[TD]", stat_line, re.MULTILINE) and "do_signal_stop" in text_of(
            Path(f"/proc/{pid}/wchan")
        ):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGSTOP)


def pid_namespace() -> int | None:
    """The namespace of this process's ids; None: it is the machine's own."""
    found = Path("/proc/self/ns/pid").stat().st_ino
    return None if found == _MACHINES_OWN else found


def group_of(folder: Path, namespace: int | None = None) -> str:
    """Name of a host's groups, and of its folder of mounts.

    Several hosts on a machine never meet there. In every pod the folder has the same path, so the
    namespace of process ids counts, with which a pod's sandboxes end.

    Args:
        folder: of the host's state.
        namespace: of the host's process ids; None: this process's.
    """
    namespace = pid_namespace() if namespace is None else namespace
    text = str(folder) if namespace is None else f"{folder}\n{namespace}"
    return f"rose-sandbox-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def own_group() -> str:
    """This process's group in the unified hierarchy, from its top; the top has an empty name.

    Raises:
        OSError: there is none, or it lies outside of what this process sees.
    """
    found = paths_by_controller(Path("/proc/self/cgroup").read_text()).get("")
    if found is None or ".." in found.parts:
        raise OSError("this process is in no unified control group that it sees")
    return str(found).strip("/")


def delegate(top: Path = TOP, own: str | None = None, *, contained: bool | None = None) -> str:
    """Make room for groups of sandboxes in a container's own group.

    What limits the container limits them there. A privileged container sees the node's hierarchy
    and not its own part of it, so its group is the one that it is in, and not the top that it sees.
    In a unified hierarchy a group with processes of its own hands no controller on. So they, this
    one among them, move into a group beside those of sandboxes. A process of the machine itself
    needs none of it, nor have the hierarchies of before.

    Args:
        top: of the hierarchy.
        own: this process's group; None: as the kernel says.
        contained: whether this is a container; None: by the namespace of its process ids.

    Returns:
        The group below which sandboxes' are made.

    Raises:
        OSError: the group cannot be written: the container is not privileged.
    """
    if contained is None:
        contained = pid_namespace() is not None
    if not is_unified(top) or not contained:
        return ""
    own = own_group() if own is None else own
    if PurePosixPath(own).name == BESIDE:  # an earlier start in this container has moved it
        own = own.rpartition("/")[0]
    if not (top / own).is_dir():  # the top that it sees is its own group
        own = ""
    group = top / own
    if not (group / "cgroup.type").exists():
        return ""  # a machine's own top
    (group / BESIDE).mkdir(exist_ok=True)
    for pid in members(group):
        if pid:  # else of another namespace; to write it would move this process
            with suppress(ProcessLookupError):
                (group / BESIDE / "cgroup.procs").write_text(str(pid))
    has = set(text_of(group / "cgroup.controllers").split())
    wanted = sorted({"cpu", "memory", "pids"} & has)
    (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
    return own


def freeze(groups: Sequence[Path]) -> None:
    """Let what is in groups of the same processes stand still; returns when it does.

    As runc looks for it: by the hierarchy of the freezer where there is one.

    Raises:
        RuntimeFailed: it moves still after ``FREEZE_SECONDS``, or there is nothing.
    """
    ends = time.monotonic() + FREEZE_SECONDS
    for pause in pauses():
        # Written anew each time: a process that was being born is caught by the next one.
        if _stands_still(groups):
            return
        if time.monotonic() > ends:
            thaw(groups)
            raise RuntimeFailed(f"what is in {groups[0]} does not stand still")
        time.sleep(pause)


def _stands_still(groups: Sequence[Path]) -> bool:
    for freezer in FREEZERS:
        for group in filter(freezer.controls, groups):
            control = group / freezer.control
            try:
                control.write_text(freezer.freeze)
            except OSError as error:
                raise RuntimeFailed(f"{control}: {error.strerror}") from error
            return freezer.is_frozen(group)
    raise RuntimeFailed(f"no group of {', '.join(map(str, groups)) or 'a sandbox'} can be frozen")


def thaw(groups: Sequence[Path]) -> None:
    """Let what is in groups go on; those that do not stand still are no error."""
    for group in groups:
        for freezer in FREEZERS:
            with suppress(OSError):
                if freezer.controls(group):
                    (group / freezer.control).write_text(freezer.thaw)


def empty(groups: Sequence[Path]) -> None:
    """Kill what is in groups of the same processes, and remove them."""
    thaw(groups)  # all of them first: one that stands still holds the others' processes
    ends = time.monotonic() + EMPTY_SECONDS
    for group in groups:
        _empty(group, ends)


def _empty(group: Path, ends: float) -> None:
    for pause in pauses():
        signal_all(members(group), signal.SIGKILL)
        if remove(group) or time.monotonic() > ends:
            return
        time.sleep(pause)


def pauses() -> Iterator[float]:
    """Seconds between two looks: a short command is not made to wait."""
    pause, longest = POLL_SECONDS
    while True:
        yield pause
        pause = min(longest, pause * 1.3)
