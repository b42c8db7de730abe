"""Who had the engines' core, look by look: evidence in CPU time of what made a request slow.

Both engines are pinned to one core, so what serving, rollouts and everybody else used of it, what
a hypervisor took away (steal) and how long serving's threads stood in the run queue adds up to the
time that passed. Next step: ``explain`` reads it for each request over its objective.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from bench.guard.cores import ENGINE_CORE

_PERIOD_SECONDS = 0.1
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Look:
    """Seconds so far, at one moment of the monotonic clock.

    Attributes:
        serving, rollouts: processor time of the two engines.
        waited: time that serving's busiest threads stood in the run queue.
        busy: the core did something for anybody.
        steal: the core was taken from this machine.
    """

    at_s: float
    serving: float
    rollouts: float
    waited: float
    busy: float
    steal: float


@dataclass(frozen=True)
class CpuShares:
    """What became of an interval, seconds."""

    elapsed: float
    serving: float
    rollouts: float
    others: float
    steal: float
    waited: float


def between(looks: Sequence[Look], start_s: float, end_s: float) -> CpuShares | None:
    """What became of an interval; None where nobody looked."""
    if len(looks) < 2 or end_s <= start_s:
        return None
    one, two = _at(looks, start_s), _at(looks, end_s)
    spent = {f.name: getattr(two, f.name) - getattr(one, f.name) for f in fields(Look)}
    others = max(0.0, spent["busy"] - spent["serving"] - spent["rollouts"])
    return CpuShares(
        spent["at_s"],
        *(spent["serving"], spent["rollouts"], others, spent["steal"], spent["waited"]),
    )


def _at(looks: Sequence[Look], at_s: float) -> Look:
    """By linear interpolation; the first or the last look beyond the ends."""
    right = bisect.bisect_right(looks, at_s, key=lambda look: look.at_s)
    if right in (0, len(looks)):
        return looks[0 if right == 0 else -1]
    one, two = looks[right - 1], looks[right]
    part = (at_s - one.at_s) / max(1e-9, two.at_s - one.at_s)
    values = (getattr(one, f.name) for f in fields(Look))
    return Look(
        *(v + part * (getattr(two, f.name) - v) for v, f in zip(values, fields(Look), strict=True))
    )


class Witness:
    """Looks every 0.1 s while a window runs.

    Args:
        serving: pid of the serving engine.
        rollouts: pid of the rollout engine; 0 = there is none.
    """

    def __init__(self, serving: int, rollouts: int) -> None:
        self.looks: list[Look] = []
        self._serving, self._rollouts = _tree(serving), _tree(rollouts) if rollouts else []
        self._threads = [_busiest(pid) for pid in self._serving]
        self._ending = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Look]]:
        """The looks of the time inside; complete afterwards."""
        thread = threading.Thread(target=self._watch, name="witness")
        thread.start()
        try:
            yield self.looks
        finally:
            self._ending.set()
            thread.join()

    def _watch(self) -> None:
        self.looks.append(self._look())
        while not self._ending.wait(_PERIOD_SECONDS):
            self.looks.append(self._look())
        self.looks.append(self._look())

    def _look(self) -> Look:
        now = time.monotonic()
        busy, steal = _core()
        return Look(
            round(now, 4),
            *(_used(self._serving), _used(self._rollouts)),
            *(round(sum(map(_waited, self._threads)), 4), busy, steal),
        )


def _tree(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    return []


def _used(pids: Sequence[int]) -> float:
    """Processor seconds of these processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(parts[11]) + int(parts[12])
    return total * _TICK_SECONDS


def _core() -> tuple[float, float]:
    """Busy and stolen seconds of the engines' core."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{ENGINE_CORE}":
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, ticks[:8])
            return (user + nice + system + irq + softirq) * _TICK_SECONDS, steal * _TICK_SECONDS
    return 0.0, 0.0


def _schedstat(path: Path) -> tuple[int, int]:
    """Nanoseconds a thread has run, and has waited to run; zeros where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, _ = path.read_text().split()
        return int(ran), int(waited)
    return 0, 0


def _busiest(pid: int) -> Path:
    """Accounts of the thread that has computed most so far."""
    with contextlib.suppress(OSError):
        found = [task / "schedstat" for task in Path(f"/proc/{pid}/task").iterdir()]
        return max(found, key=_schedstat)
    return Path(f"/proc/{pid}/schedstat")


def _waited(path: Path) -> float:
    return _schedstat(path)[1] / 1e9
