"""Whose a process on a GPU is: a rollout engine's, a pod's, or another's, by its cgroup.

NVML names processes by the node's pids, so this needs the node's pid namespace (``hostPID``), which
the guard has. An engine's cgroup bears the engine host's prefix and the slot's uid, whatever
container it is below, so an engine is known even when its host has forgotten it.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rose_agent.os.processes import PROC, proc_text
from rose_core.uids import PodUid, SlotUid
from rose_engines.node.rundir import slot_of

_ENGINE = re.compile(r"/rose-[0-9a-f]{8}-(?P<slot>[A-Za-z0-9][-A-Za-z0-9._]*)$", re.MULTILINE)
_POD = re.compile(r"pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
# The first thread, which may have ended, and some in case that more are just ending.
_MOST_THREADS = 4


@dataclass(frozen=True)
class Owner:
    """Who a process belongs to; all empty = nobody that we know.

    Attributes:
        slot: uid of the slot whose engine it is.
        pod: uid of its pod, also of the engine host's for an engine.
    """

    slot: SlotUid = SlotUid("")
    pod: PodUid = PodUid("")


def parse(cgroups: str) -> Owner:
    """Read ``/proc/PID/cgroup``."""
    engine, pod = _ENGINE.search(cgroups), _POD.search(cgroups)
    return Owner(
        SlotUid(slot_of(engine["slot"]) if engine else ""),
        PodUid(pod["uid"].replace("_", "-") if pod else ""),
    )


def owner_of(pid: int, proc: Path = PROC) -> Owner | None:
    """Whose the process is; None when it is gone or cannot be seen from here.

    A process may end its first thread and go on with others. With cgroup v1 the kernel then calls
    the process one of the root, and each of the others by its true place.
    """
    try:
        owner = parse(proc_text(pid, "cgroup", proc=proc))
        threads = [] if owner.pod else os.listdir(proc / str(pid) / "task")  # noqa: PTH208  # names alone
    except OSError:
        return None
    for thread in threads[:_MOST_THREADS]:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            of_thread = parse(proc_text(f"{pid}/task/{thread}", "cgroup", proc=proc))
            owner = of_thread if of_thread.pod else owner
    return owner


def command_of(pid: int, proc: Path = PROC) -> str:
    """A process's name, safe to print: it chose the bytes; empty when it is gone."""
    try:
        name = proc_text(pid, "comm", proc=proc).strip()
    except OSError:
        return ""
    return "".join(each if each.isprintable() else "?" for each in name)
