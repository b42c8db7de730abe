"""Processes of sandboxes, by what ``/proc`` says, and the groups that they are in.

Next step: ``runc`` ends and freezes them.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = (0.002, 0.03)
"""The first and the longest pause between two looks."""


def text_of(path: Path) -> str:
    """A file of text; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Stat:
    """A process, by numbers of the host; ``started`` in ticks since the machine did."""

    parent: int
    session: int
    started: int


def stat_of(pid: int) -> Stat | None:
    """None: it has ended."""
    words = text_of(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()
    return Stat(int(words[1]), int(words[3]), int(words[19])) if words else None


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


def hierarchies() -> list[Path]:
    """Where groups of this machine lie: one folder, or one for each controller."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        return [top]
    return [folder for folder in top.iterdir() if folder.is_dir()]


def delegate(top: Path = Path("/sys/fs/cgroup")) -> None:
    """Make room for groups of sandboxes in a container's own group.

    In a unified hierarchy a group with processes of its own hands no controller on. So they, this
    one among them, move into a group beside those of sandboxes. A machine's own top needs none of
    it, nor has the hierarchies of before.

    Raises:
        OSError: the group cannot be written: the container is not privileged.
    """
    if not (top / "cgroup.type").exists():
        return
    (top / "host").mkdir(exist_ok=True)
    for pid in text_of(top / "cgroup.procs").split():
        with suppress(ProcessLookupError):
            (top / "host" / "cgroup.procs").write_text(pid)
    has = set(text_of(top / "cgroup.controllers").split())
    wanted = sorted({"cpu", "memory", "pids"} & has)
    (top / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))


def empty(groups: Sequence[Path]) -> None:
    """Kill what is in groups of the same processes, and remove them."""
    for group in groups:  # all of them first: one that stands still holds the others' processes
        for name, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with suppress(OSError):
                if (group / name).exists():
                    (group / name).write_text(word)
    for group in groups:
        _empty(group)


def _empty(group: Path) -> None:
    for _ in range(50):
        pids = text_of(group / "cgroup.procs").split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        with suppress(OSError):
            group.rmdir()
            return
        if not group.exists():
            return
        time.sleep(0.02)


def pauses() -> Iterator[float]:
    """Seconds between two looks: a short command is not made to wait."""
    pause, longest = POLL_SECONDS
    while True:
        yield pause
        pause = min(longest, pause * 1.3)
