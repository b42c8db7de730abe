"""What an engine may take of its node: memory, processes, cores, shared memory.

| limit | v2 | v1 | past it |
|---|---|---|---|
| memory | ``memory.max``, ``memory.oom.group`` | ``memory.limit_in_bytes`` | it is killed |
| processes | ``pids.max`` | ``pids.max`` | ``fork`` fails, the engine alone suffers |
| cores | ``cpu.max`` | ``cpu.cfs_quota_us`` | it waits |
| shared memory | its own ``/dev/shm`` (``exec_engine``), as memory | the same | writes fail |

Each controller is used where it is: a machine may have v1 and v2 beside each other. In v2 a cgroup
with processes cannot hand controllers down, so the host first moves into a leaf of its own. A limit
that was asked for and cannot be set is an error at the start: an engine host that promised to
contain its engines and cannot is not ready. Next step: ``process`` joins what is prepared here.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose_agent.errors import GroupError, NoLimits
from rose_agent.os.freezers import HOST_LEAF, own_base
from rose_agent.os.mounts import locate, parse_mountinfo
from rose_wire.cgroups import paths_by_controller

_log = logging.getLogger(__name__)

_PERIOD_US = 100_000
# Short, so that an engine that may compute again is not held back by the end of a period; the
# kernel takes no quota below a millisecond.
_BUSY_PERIOD_US = 20_000
LEAST_BUSY_PERCENT = 5
# An engine has a few hundred threads; what needs more than this is not computing tokens.
PROCESSES = 4096


@dataclass(frozen=True)
class Limits:
    """0 = no limit.

    Attributes:
        busy_cpu_percent: of a core, while serving is busy (``cpu_throttle``).
    """

    memory_bytes: int = 0
    pids: int = 0
    cpu_percent: int = 0
    shm_bytes: int = 0
    busy_cpu_percent: int = 0

    def wanted(self) -> dict[str, int]:
        """Controller -> its limit."""
        asked = {"memory": self.memory_bytes, "pids": self.pids, "cpu": self.cpu_percent}
        later = {"cpu"} if self.busy_cpu_percent else set()
        return {name: limit for name, limit in asked.items() if limit or name in later}


@dataclass(frozen=True)
class CgroupBase:
    """Where a controller's cgroups are made."""

    version: int
    folder: Path


def v1_base(controller: str, proc: Path = Path("/proc/self")) -> Path | None:
    """Folder of our own cgroup in a controller's v1 hierarchy; None when it is not mounted."""
    path = paths_by_controller((proc / "cgroup").read_text(errors="replace")).get(controller)
    if path is None:
        return None
    mounts = parse_mountinfo((proc / "mountinfo").read_text(errors="replace"))
    return locate(mounts, 1, path, controller)


class Limiter:
    """Makes the cgroups that hold an engine's limits.

    Args:
        limits: of every engine.
        bases: controller -> where its cgroups are made; a limit without one is not set.
        prefix: how their names begin, the freezer's: a sweep takes what begins so for our own.
    """

    def __init__(self, limits: Limits, bases: Mapping[str, CgroupBase], prefix: str) -> None:
        self.limits = limits
        self.bases = bases
        self._prefix = prefix

    @classmethod
    def detect(
        cls,
        limits: Limits,
        prefix: str,
        v2_base: Callable[[], Path | None] = lambda: own_base(2),
        v1: Callable[[str], Path | None] = v1_base,
    ) -> Limiter:
        """Find where each wanted limit can be set.

        Raises:
            NoLimits: one of them cannot; says which.
        """
        bases = {name: _find(name, v2_base(), v1) for name in limits.wanted()}
        missing = sorted(name for name, base in bases.items() if base is None)
        if missing:
            raise NoLimits(
                f"engines cannot be limited in {', '.join(missing)}: no cgroup hierarchy with that "
                f"controller can be written here; give the container its cgroup or set it to 0"
            )
        return cls(limits, {name: base for name, base in bases.items() if base}, prefix)

    def prepare(self, uid: str) -> tuple[Path, ...]:
        """Make a slot's cgroups and set the limits.

        Returns:
            Folders that the engine must join.

        Raises:
            GroupError: the kernel refused.
        """
        folders: list[Path] = []
        for name, limit in self.limits.wanted().items():
            base = self.bases[name]
            folder = base.folder / f"{self._prefix}{uid}"
            try:
                folder.mkdir(exist_ok=True)
                for file, text in _settings(name, base.version, limit).items():
                    (folder / file).write_text(text)
            except OSError as error:
                message = f"cannot limit {name} in {folder}: {error.strerror}"
                raise GroupError(message) from error
            if folder not in folders:
                folders.append(folder)
        return tuple(folders)

    def set_quota(self, uid: str, *, busy: bool) -> None:
        """Give an engine the quota for busy serving, or its own, and read it back.

        Raises:
            GroupError: the kernel refused, or keeps another one.
        """
        base = self.bases["cpu"]
        folder = base.folder / f"{self._prefix}{uid}"
        own = self.limits.cpu_percent
        lower = min(filter(None, (self.limits.busy_cpu_percent, own)), default=0)
        period = _BUSY_PERIOD_US if busy else _PERIOD_US
        files = _quota(base.version, lower if busy else own, period)
        try:
            for file, text in files.items():
                (folder / file).write_text(text)
            kept = {file: (folder / file).read_text().strip() for file in files}
        except OSError as error:
            raise GroupError(f"cannot set the quota of {folder}: {error.strerror}") from error
        if kept != files:
            raise GroupError(f"{folder} has the quota {kept} instead of {files}")

    def broken(self, uid: str) -> str:
        """Which limit the engine ran into, for people; empty when none."""
        found = []
        if self._count(uid, "memory", "oom_kill"):
            size = self.limits.memory_bytes >> 20
            found.append(f"it was killed at its memory limit of {size} MiB")
        if self._count(uid, "pids", "max"):
            found.append(f"it ran into its limit of {self.limits.pids} processes")
        return ", ".join(found)

    def remove(self, uid: str) -> None:
        """Remove a slot's cgroups; they are empty once the engine has ended."""
        for base in self.bases.values():
            with contextlib.suppress(OSError):
                (base.folder / f"{self._prefix}{uid}").rmdir()

    def sweep(self) -> None:
        """Remove empty cgroups that an earlier host left."""
        for base in self.bases.values():
            for folder in base.folder.glob(f"{self._prefix}*"):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _count(self, uid: str, name: str, event: str) -> int:
        base = self.bases.get(name)
        if base is None:
            return 0
        files = {("memory", 1): "memory.oom_control"}
        file = files.get((name, base.version), f"{name}.events")
        try:
            text = (base.folder / f"{self._prefix}{uid}" / file).read_text()
        except OSError:
            return 0
        fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        return int(fields.get(event, 0))


def _find(name: str, v2_base: Path | None, v1: Callable[[str], Path | None]) -> CgroupBase | None:
    if v2_base is not None and _delegate(v2_base, name):
        return CgroupBase(2, v2_base)
    folder = v1(name)
    return CgroupBase(1, folder) if folder is not None and _writable(folder) else None


def _writable(base: Path) -> bool:
    probe = base / f"rose-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        _log.info("cannot make a cgroup below %s: %s", base, error)
        return False
    return True


def _delegate(base: Path, name: str) -> bool:
    """Make a v2 controller available to children of ``base``."""
    try:
        if name not in (base / "cgroup.controllers").read_text().split():
            return False
        control = base / "cgroup.subtree_control"
        if name in control.read_text().split():
            return True
        leaf = base / HOST_LEAF
        leaf.mkdir(exist_ok=True)
        for pid in (base / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it ended meanwhile
                (leaf / "cgroup.procs").write_text(pid)
        control.write_text(f"+{name}")
    except OSError as error:
        _log.info("cgroup v2 below %s hands no %s down: %s", base, name, error)
        return False
    return True


def _settings(name: str, version: int, limit: int) -> dict[str, str]:
    """Files of a cgroup and what is written into them, in this order."""
    if name == "pids":
        return {"pids.max": str(limit)}
    if name == "memory":
        if version == 1:
            return {"memory.limit_in_bytes": str(limit)}
        return {"memory.max": str(limit), "memory.oom.group": "1"}
    return _quota(version, limit, _PERIOD_US)


def _quota(version: int, percent: int, period_us: int) -> dict[str, str]:
    quota = percent * period_us // 100
    if version == 1:
        limit = str(quota) if quota else "-1"
        return {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": limit}
    return {"cpu.max": f"{quota or 'max'} {period_us}"}
