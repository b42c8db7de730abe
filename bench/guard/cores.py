"""Where the benchmark's processes run: the engines on one core, everything else off it, as equals.

Sessions get a group of their own from the kernel (autogroup, sched(7)), and groups that share a
core are weighed against each other anew at every sleep and every wake. With a serving engine that
sleeps hundreds of times a second and a rollout engine that only wants to run, Linux 6.18 let the
latter wait for half a minute. Two processes that share a GPU meet no such rule, so here all
processes join one group, in which the kernel weighs threads only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from rose_agent.os.groups import wait_for
from rose_agent.os.limits import v1_base

ENGINE_CORE = 0
_PATIENCE_SECONDS = 10.0


def pin(pid: int) -> None:
    """Put a process tree with all its threads on the engines' core."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {ENGINE_CORE})


def stand_aside() -> None:
    """Keep this process, and what it starts, off the engines' core where there is another."""
    others = set(range(os.cpu_count() or 1)) - {ENGINE_CORE}
    if others:
        for thread in psutil.Process().threads():
            os.sched_setaffinity(thread.id, others)


@contextlib.contextmanager
def one_group() -> Iterator[bool]:
    """Put this process, and what it starts, into one group of the scheduler.

    A task outside the root of the ``cpu`` hierarchy has no group by its session. Without a v1
    hierarchy that can be written, nothing is changed.

    Yields:
        Whether it is so.
    """
    base = v1_base("cpu")
    group = base / f"rose-bench-{os.getpid()}" if base is not None else None
    try:
        if group is not None:
            group.mkdir()
            _join(group)
    except OSError:
        group = None
    try:
        yield group is not None
    finally:
        if group is not None and base is not None:
            wait_for(lambda: _left(group, base), _PATIENCE_SECONDS)


def _left(group: Path, base: Path) -> bool:
    """Move everybody out and remove the group; false while the kernel still buries somebody."""
    for pid in (group / "cgroup.procs").read_text().split():
        _join(base, int(pid))
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _join(group: Path, pid: int = 0) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid or os.getpid()))
