"""How much of the machine something else used meanwhile: what makes a measurement worthless."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Used:
    """CPU seconds of the whole machine and of this process with its descendants, so far."""

    at_s: float
    machine_s: float
    own_s: float


def used() -> Used:
    """Now."""
    whole = psutil.cpu_times()
    own = 0.0
    root = psutil.Process()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            own += times.user + times.system
    busy = whole.user + whole.system + whole.nice + whole.irq + whole.softirq + whole.steal
    return Used(time.monotonic(), busy, own)


def strangers(before: Used, after: Used) -> float:
    """Share of the machine that everything else used between two looks, 0..1."""
    possible = (after.at_s - before.at_s) * (os.cpu_count() or 1)
    others = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others / possible)) if possible > 0 else 0.0
