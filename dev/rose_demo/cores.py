"""One core stands in for one GPU: who may run where on this machine.

The lent replica's serving engine and the rollout engine beside it share one core, as two processes
share a GPU; nothing else may run there. Everything else of the node (control plane, dedicated
engine, router, never-lent replica) and the demo's own processes get the other cores. Guard and tap
may run anywhere: on a GPU node they would not compete with the device either.

Deciding who goes where is pure (``decide``); ``apply`` reads ``/proc`` and sets affinities.

The trainer stands for another machine, and must not be what makes serving slow: on the other cores
it has what pods that ask for nothing have (``as_best_effort``). Its nice value would not do that.
It counts among the processes of one session, and the node is a group as heavy as the session.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rose_demo.errors import SetUpFailed
from rose_dev.errors import StartFailed
from rose_dev.waiting import wait_until
from rose_wire.cgroups import TOP, hierarchies, is_unified, remove


class Cores(Enum):
    """Where a process belongs."""

    STAND_IN = "the core that stands in for the GPU"
    REST = "every other core"
    ANY = "all cores"


_ENGINES = ("sglang", "vllm")
"""In the folder of an engine's Python, and in the titles that engines give their processes."""


@dataclass(frozen=True)
class Process:
    """A process as ``/proc`` shows it."""

    pid: int
    cgroup: str
    command: str


def decide(
    processes: Iterable[Process], *, lent_pod: str, host_pod: str, free_pods: Iterable[str]
) -> dict[int, Cores]:
    """Cores of every process of the node.

    Args:
        processes: all of the node.
        lent_pod: uid of the lent serving pod.
        host_pod: uid of the engine host's pod; of it only engines go to the stand-in core.
        free_pods: uids whose processes may run anywhere.
    """
    free = tuple(free_pods)
    result = {}
    for process in processes:
        engine = host_pod in process.cgroup and _is_engine(process.command)
        if lent_pod in process.cgroup or engine:
            result[process.pid] = Cores.STAND_IN
        elif any(pod in process.cgroup for pod in free):
            result[process.pid] = Cores.ANY
        else:
            result[process.pid] = Cores.REST
    return result


def _is_engine(command: str) -> bool:
    """Engines run with their own Python, and rename themselves; the host only names that Python."""
    program = command.split(" ", 1)[0].lower()
    return any(kind in program for kind in _ENGINES)


def cores() -> dict[Cores, set[int]]:
    """The machine's cores by role; with one core everything shares it."""
    usable = sorted(os.sched_getaffinity(0))
    return {
        Cores.STAND_IN: {usable[0]},
        Cores.REST: set(usable[1:]) or {usable[0]},
        Cores.ANY: set(usable),
    }


def read(pids: Iterable[int], proc: Path = Path("/proc")) -> list[Process]:
    """Processes that are still there."""
    found = []
    for pid in pids:
        with suppress(OSError):
            folder = proc / str(pid)
            command = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            cgroup = (folder / "cgroup").read_text()
            found.append(Process(pid, cgroup, command.replace("\0", " ")))
    return found


def apply(decision: Mapping[int, Cores], where: Mapping[Cores, set[int]]) -> None:
    """Set the affinity of every thread; a process that has ended meanwhile is skipped."""
    for pid, role in decision.items():
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # names are enough
                with suppress(OSError):
                    os.sched_setaffinity(int(task), where[role])


_BEST_EFFORT = "kubepods/besteffort/rose-demo-trainer"
_REMOVAL_SECONDS = 5.0


@contextmanager
def as_best_effort(tree: str, top: Path = TOP) -> Iterator[Callable[[int], None]]:
    """A group in which processes weigh, for the block, what a pod weighs that asks for nothing.

    They have to have ended by the end of the block, or the group stays until the node goes.

    Args:
        tree: name of the node's cgroup tree.
        top: where groups lie.

    Yields:
        Joins a process to the group; what it starts goes with it.

    Raises:
        SetUpFailed: the node has no such group.
    """
    bases = [one for one in hierarchies(top) if is_unified(top) or "cpu" in one.name.split(",")]
    group = (bases or [top])[0] / tree / _BEST_EFFORT
    try:
        group.mkdir(exist_ok=True)
    except OSError as error:
        message = f"no group for the trainer at {group} ({error}): is the node's kubelet running?"
        raise SetUpFailed(message) from error

    def join(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))

    try:
        yield join
    finally:
        with suppress(StartFailed):
            wait_until(lambda: remove(group), f"{group} is gone", seconds=_REMOVAL_SECONDS)
