"""Choose how engine trees are stopped on this machine, and say why.

``detect`` tries v2, then v1, by making, freezing and removing an empty cgroup below the host's
own: only what worked is offered. A container whose cgroup mount is read-only gets one remount
attempt, which needs SYS_ADMIN. Next step: ``groups`` for what the drivers do.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rose_agent.errors import GroupError, NoFreezer
from rose_agent.os.cgroup_ids import through_the_node
from rose_agent.os.groups import ProcessGroup, SignalGroup, V1Group, V2Group
from rose_agent.os.mounts import locate, parse_mountinfo
from rose_wire.cgroups import V1, V2, paths_by_controller

Choice = Literal["auto", "v1", "v2", "signals"]

_MS_REMOUNT_BIND = 0x20 | 0x1000
# Where the host itself moves in v2, so that its own cgroup may hand controllers down (``limits``).
HOST_LEAF = "rose-host"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Freezer:
    """The way to stop trees that this machine offers.

    Attributes:
        driver: ``v1``, ``v2`` or ``signals``.
        reason: why this one, in words.
        base: folder below which engine cgroups are made; None for ``signals``.
        prefix: how their names begin; sweeps know the host's cgroups by it (``prefix_of``).
    """

    driver: str
    reason: str
    base: Path | None = None
    prefix: str = field(kw_only=True)

    def directory(self, uid: str) -> Path | None:
        """Folder of a slot's cgroup."""
        return None if self.base is None else self.base / f"{self.prefix}{uid}"

    def prepare(self, uid: str) -> Path | None:
        """Make the slot's cgroup, empty and thawed.

        Raises:
            GroupError: it cannot be made.
        """
        directory = self.directory(uid)
        if directory is None:
            return None
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            message = f"cannot make the cgroup {directory}: {error.strerror}"
            raise GroupError(message) from error
        group(self.driver, directory, 0).thaw()
        return directory

    def group(self, uid: str, leader: int) -> ProcessGroup:
        """The tree of a slot whose first process is ``leader``."""
        return group(self.driver, self.directory(uid), leader)

    def strays(self) -> tuple[ProcessGroup, ...]:
        """Every engine cgroup below ours, also those of earlier hosts."""
        if self.base is None:
            return ()
        return tuple(
            group(self.driver, path, 0)
            for path in sorted(self.base.glob(f"{self.prefix}*"))
            if path.is_dir()
        )


def group(driver: str, directory: Path | None, leader: int) -> ProcessGroup:
    """A tree by driver name; ``leader`` matters for ``signals`` only."""
    if directory is None:
        return SignalGroup(leader)
    return V2Group(directory) if driver == "v2" else V1Group(directory)


def own_base(version: int, proc: Path = Path("/proc/self")) -> Path | None:
    """Folder of the host's own cgroup, None when it is not mounted here."""
    paths = paths_by_controller((proc / "cgroup").read_text(errors="replace"))
    path = paths.get("freezer" if version == 1 else "")
    if path is None:
        return None
    path = path.parent if path.name == HOST_LEAF else path
    mounts = parse_mountinfo((proc / "mountinfo").read_text(errors="replace"))
    found = locate(mounts, version, path)
    if version == 1 or found is None or not found.exists():
        return found
    return through_the_node(mounts, found.stat().st_ino) or found


def _remount(base: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(base), None, _MS_REMOUNT_BIND, None) != 0:
        _log.info("cannot remount %s writable: %s", base, os.strerror(ctypes.get_errno()))


def _try(driver: str, base: Path, prefix: str) -> str:
    """Freeze an empty cgroup; returns why it does not work, or an empty string."""
    directory = base / f"{prefix}probe-{os.getpid()}"
    for attempt in range(2):
        try:
            directory.mkdir()
            break
        except OSError as error:
            if attempt == 1:
                return f"cannot make a cgroup below {base}: {error.strerror}"
            _remount(base)
    probe = group(driver, directory, 0)
    control = directory / (V2.control if driver == "v2" else V1.control)
    try:
        if not control.exists():
            return f"{control} is missing"
        probe.freeze()
        probe.thaw()
    except GroupError as error:
        return str(error)
    finally:
        probe.remove()
    return ""


def prefix_of(scope: str) -> str:
    """How names of a host's cgroups begin; others on the machine have ``rose-`` in common only."""
    return f"rose-{hashlib.sha256(scope.encode()).hexdigest()[:8]}-"


def detect(
    choice: Choice,
    scope: str = "",
    base_of: Callable[[int], Path | None] = own_base,
) -> Freezer:
    """Pick a driver.

    Args:
        choice: ``auto`` takes the first that works of v2, v1, signals; a name takes only that.
        scope: what tells this host from others that share its cgroup (its run directory).
        base_of: finds the folder of our own cgroup by hierarchy version.

    Raises:
        NoFreezer: the named driver does not work here.
    """
    failures: list[str] = []
    prefix = prefix_of(scope)
    for version in (2, 1):
        driver = f"v{version}"
        if choice not in {"auto", driver}:
            continue
        base = base_of(version)
        failure = f"no {driver} hierarchy that can freeze is mounted" if base is None else ""
        if base is not None:
            failure = _try(driver, base, prefix)
        if not failure:
            why = "; ".join([*failures, f"{driver} works below {base}"])
            return Freezer(driver, why, base, prefix=prefix)
        failures.append(f"not {driver}: {failure}")
    if choice in {"auto", "signals"}:
        why = "; ".join([*failures, "SIGSTOP to every process of the engine's session"])
        return Freezer("signals", why, prefix=prefix)
    raise NoFreezer("; ".join(failures))
