"""What a host that was killed leaves behind, and how a test ends it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rose_agent.errors import NoLimits
from rose_agent.host.processes.repair import repair
from rose_agent.os import freezers
from rose_agent.os.limits import Limiter, Limits
from rose_engines.node.rundir import RunDir


def sweep(rundir: Path, driver: freezers.Choice) -> None:
    """End its engines, and remove the cgroups that held them and their limits."""
    freezer = freezers.detect(driver, scope=str(rundir.resolve()))
    repair(RunDir(rundir), freezer)
    for limits in (Limits(pids=1), Limits(memory_bytes=1)):
        with contextlib.suppress(NoLimits):  # then there is none to remove
            Limiter.detect(limits, freezer.prefix).sweep()
