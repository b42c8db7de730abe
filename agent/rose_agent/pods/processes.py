"""Processes of serving pods: found by cgroup path, their end heard through pidfds.

A pod's processes carry its UID and the container's id in ``/proc/PID/cgroup``, below whatever the
runtime and the cgroup driver put around them. Processes vanish between listing and reading; that
is ordinary. Only what the kernel itself holds is read here: a command line is the process's own
memory, so ``rose_agent.signals.confined`` reads it. The name (``comm``) is the process's own word,
which is asked for one thing: which one is SGLang's scheduler, whose load snapshot is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose_agent.os.processes import PROC, proc_text
from rose_core.identity import PodUid

# ``sglang::scheduler``, as the kernel cuts it off.
_SCHEDULER = "sglang::schedul"
# Looks at a process that is of no pod of ours, before it counts as a stranger.
_SURE = 2
COMPLETE_EVERY = 15
# Processes of one pod that are described, in the guard's loop: an engine on eight GPUs has some
# fifty, and a pod may have as many as it likes.
MOST_DESCRIBED = 512


@dataclass(frozen=True)
class PodProcess:
    """A process of a pod.

    Attributes:
        first: it is pid 1 of its container, and not the sandbox's pause process.
        scheduler: it is SGLang's scheduler.
    """

    pid: int
    container: str
    first: bool
    scheduler: bool


def inner_pid(pid: int) -> int:
    """A process's pid in its innermost namespace.

    ``/proc/PID/status`` says it too, and takes 14 ms for one in 65,536 groups, as a process of any
    container may be; a pidfd tells it in 16 us.

    Raises:
        OSError: it has ended, or we have no descriptor left.
    """
    descriptor = os.pidfd_open(pid)
    try:
        status = proc_text("self", f"fdinfo/{descriptor}")
    finally:
        os.close(descriptor)
    if "NSpid:" not in status:  # Linux before 5.5
        status = proc_text(pid, "status")
    # The last of that name: a process may call itself so.
    return int(status.rpartition("NSpid:")[2].split("\n")[0].split()[-1])


class Processes:
    """Finds the processes of pods, look after look.

    A node has thousands of processes, and few of them serve. Asking the kernel whose each one is
    would cost the guard a hundredth of a core, so a stranger is not asked again:

    | process | asked |
    |---|---|
    | of one of the pods | in every look |
    | a stranger once | again: a container's first process is forked outside of its cgroup |
    | of a pod, beyond ``MOST_DESCRIBED`` of it | as a stranger |
    | a stranger twice | in one of ``COMPLETE_EVERY``: its number may be another's by then |
    | any, when a pod is new | now |

    Args:
        proc: the kernel's list.
        inner: tells a process's pid in its own namespace.
    """

    def __init__(self, proc: Path = PROC, inner: Callable[[int], int] = inner_pid) -> None:
        self._proc = proc
        self._inner = inner
        self._strangers: dict[str, int] = {}
        self._uids: frozenset[PodUid] = frozenset()
        self._looks = 0

    def scan(self, uids: Iterable[PodUid]) -> dict[PodUid, list[PodProcess]]:
        """Processes of the pods with these UIDs, by UID."""
        # The systemd cgroup driver writes a UID with underscores.
        wanted = {form: uid for uid in uids for form in (uid, uid.replace("-", "_"))}
        found: dict[PodUid, list[PodProcess]] = {uid: [] for uid in wanted.values()}
        new = not frozenset(found) <= self._uids
        self._uids = frozenset(found)
        self._looks += 1
        before, self._strangers = self._strangers, {}
        if not wanted:
            return found
        for name in filter(str.isdigit, os.listdir(self._proc)):  # noqa: PTH208  # hot path
            times = before.get(name, 0)
            if times >= _SURE and not new and (int(name) - self._looks) % COMPLETE_EVERY:
                self._strangers[name] = times
                continue
            with contextlib.suppress(OSError):  # it has ended meanwhile
                cgroup = proc_text(name, "cgroup", proc=self._proc)
                uid = _pod_of(cgroup, wanted)
                if uid is None or len(found[uid]) >= MOST_DESCRIBED:
                    self._strangers[name] = times + 1
                else:
                    found[uid].append(self._describe(int(name), cgroup))
        return found

    def _describe(self, pid: int, cgroup: str) -> PodProcess:
        name = proc_text(pid, "comm", proc=self._proc).strip()
        return PodProcess(
            pid,
            container_id(cgroup),
            first=name != "pause" and self._inner(pid) == 1,
            scheduler=name == _SCHEDULER,
        )


def _pod_of(cgroup: str, wanted: Mapping[str, PodUid]) -> PodUid | None:
    """The outermost of these pods: a container that may write cgroups names those inside."""
    places = ((cgroup.find(f"pod{form}"), uid) for form, uid in wanted.items())
    return min(((at, uid) for at, uid in places if at >= 0), default=(0, None))[1]


def container_id(cgroup: str) -> str:
    """The 64 hex digits of the innermost container in a ``/proc/PID/cgroup`` text."""
    for line in cgroup.split("\n"):
        for part in reversed(line.split("/")):
            name = part.removesuffix(".scope").rpartition("-")[2]
            if len(name) == 64 and all(c in "0123456789abcdef" for c in name):
                return name
    return ""


class Watcher:
    """Calls back at once when a watched process ends.

    Args:
        on_exit: called with the pid.
    """

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit
        self._descriptors: dict[int, int] = {}

    def watch(self, pids: Iterable[int]) -> None:
        """Watch exactly these processes; one that is gone already is reported at once."""
        wanted = set(pids)
        for pid in set(self._descriptors) - wanted:
            self._forget(pid)
        loop = asyncio.get_running_loop()
        for pid in wanted - set(self._descriptors):
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:  # it has ended, or cannot be watched
                loop.call_soon(self._on_exit, pid)
                continue
            self._descriptors[pid] = descriptor
            loop.add_reader(descriptor, self._note_end, pid)

    def close(self) -> None:
        """Watch nothing."""
        for pid in list(self._descriptors):
            self._forget(pid)

    def _note_end(self, pid: int) -> None:
        self._forget(pid)
        self._on_exit(pid)

    def _forget(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
