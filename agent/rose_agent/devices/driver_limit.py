"""Memory limits that the driver itself enforces, per cgroup and GPU: the backstop of all others.

Drivers from r615 on keep a soft and a hard limit for each cgroup (kernel controller ``dmem``, or
the driver's own books where the kernel has none). An engine gets soft 0, so that it gives way
first, and hard what it was sized for: an allocation beyond it fails in the engine and nowhere else.
They are set through ``nvidia-smi memory-limits``, never by writing ``dmem.max``, because the driver
also keeps the ancestors' sums; and they are read back, because a limit on a cgroup that the
controller does not cover is taken and limits nobody. Needs cgroup v2.
``python -m rose_agent.devices.fake_limits`` speaks the same grammar without a GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rose_agent.errors import QueryFailed
from rose_core.uids import GpuUuid

PROGRAM = ("nvidia-smi",)
MIB = 1 << 20
_ANSWER_SECONDS = 10.0
_LINE = re.compile(r"^(soft limit|hard limit|current used):\s*(\d+) MiB$", re.MULTILINE)


@dataclass(frozen=True)
class LimitSeen:
    """What the driver says about a cgroup on one GPU, bytes."""

    soft: int
    hard: int
    used: int


class DriverLimits(Protocol):
    """Sets driver limits."""

    def folder(self, name: str) -> Path:
        """The cgroup that an engine of this name joins, made.

        Raises:
            OSError: it cannot be made.
        """
        ...

    def set(self, cgroup: Path, uuid: GpuUuid, size: int) -> int:
        """Limit a cgroup to this many bytes of a GPU; returns the limit that holds.

        Raises:
            QueryFailed: the driver refused, or holds another limit than it was given.
        """
        ...

    def refusal(self, uuid: GpuUuid) -> str:
        """Why no limit can be set; empty when one can."""
        ...


class SmiLimits:
    """Through the command line program.

    Args:
        base: cgroup v2 folder below which engines' cgroups are made; None = there is none.
        prefix: how their names begin.
        program: the program, and arguments that come before its own.
    """

    def __init__(
        self, base: Callable[[], Path | None], prefix: str, program: Sequence[str] = PROGRAM
    ) -> None:
        self._base = base
        self._prefix = prefix
        self._program = tuple(program)

    def folder(self, name: str) -> Path:
        """Make the cgroup ``PREFIX + name`` below the base, if it is not there.

        Raises:
            FileNotFoundError: cgroup v2 is not mounted here.
            OSError: it cannot be made.
        """
        base = self._base()
        if base is None:
            raise FileNotFoundError("driver limits need cgroup v2, which is not mounted here")
        folder = base / f"{self._prefix}{name}"
        folder.mkdir(exist_ok=True)
        return folder

    def set(self, cgroup: Path, uuid: GpuUuid, size: int) -> int:
        """Limit a cgroup's memory on a GPU: soft 0, hard ``size`` bytes rounded up to MiB.

        Returns:
            The hard limit as the driver reads it back, bytes.

        Raises:
            QueryFailed: the driver refuses, or keeps another limit.
        """
        hard = -(-size // MIB)
        limits = ["--soft-limit", "0", "--hard-limit", str(hard)]
        self._ask("--set", "--namespace", str(cgroup), *limits, "-i", uuid)
        seen = self.get(cgroup, uuid)
        if seen.hard < hard * MIB or seen.hard > 2 * hard * MIB:
            raise QueryFailed(
                f"the driver was told to limit {cgroup} to {hard} MiB of {uuid} and says "
                f"{seen.hard // MIB}: is the controller dmem handed down to this cgroup?"
            )
        return seen.hard

    def get(self, cgroup: Path, uuid: GpuUuid) -> LimitSeen:
        """Read a cgroup's limits.

        Raises:
            QueryFailed: the driver has no answer.
        """
        text = self._ask("--get", "-n", str(cgroup), "-i", uuid)
        found = {name: int(size) * MIB for name, size in _LINE.findall(text)}
        try:
            return LimitSeen(found["soft limit"], found["hard limit"], found["current used"])
        except KeyError as error:
            raise QueryFailed(f"nvidia-smi memory-limits says no {error}: {text!r}") from error

    def refusal(self, uuid: GpuUuid) -> str:
        """Tried by reading our own base's limits."""
        base = self._base()
        if base is None:
            return "cgroup v2 is not mounted in the engine host; boot the node with it"
        try:
            self.get(base, uuid)
        except QueryFailed as error:
            return f"{error}; it needs a driver from r615 on"
        return ""

    def _ask(self, *arguments: str) -> str:
        try:
            done = subprocess.run(  # the program is the platform's
                [*self._program, "memory-limits", *arguments],
                capture_output=True,
                text=True,
                timeout=_ANSWER_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise QueryFailed(f"nvidia-smi memory-limits: {error}") from error
        if done.returncode != 0:
            output = f"{done.stdout} {done.stderr}".strip()
            raise QueryFailed(f"nvidia-smi memory-limits: {output}")
        return done.stdout
