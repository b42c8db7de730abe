"""Where a cgroup is in *this* process's file system: pure parsing of two proc files.

The kernel names a cgroup by its path in the hierarchy (``/proc/PID/cgroup``); a container sees
the hierarchy mounted somewhere else, often only the part below its own cgroup. ``locate`` brings
the two together. Next step: ``groups``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class CgroupMount:
    """One mounted cgroup hierarchy.

    Attributes:
        version: 1 or 2.
        controllers: names of a v1 hierarchy; empty for v2.
        root: path inside the hierarchy that is mounted.
        point: where it is mounted here.
        writable: neither the mount nor the file system is read-only.
    """

    version: int
    controllers: frozenset[str]
    root: PurePosixPath
    point: Path
    writable: bool


def parse_mountinfo(text: str) -> tuple[CgroupMount, ...]:
    """Read the cgroup mounts out of ``/proc/self/mountinfo``."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, file_system = left.split(), right.split()
        if len(fields) < 6 or len(file_system) < 3 or file_system[0] not in {"cgroup", "cgroup2"}:
            continue
        options = frozenset(file_system[2].split(","))
        found.append(
            CgroupMount(
                version=1 if file_system[0] == "cgroup" else 2,
                controllers=options - {"rw", "ro"} if file_system[0] == "cgroup" else frozenset(),
                root=PurePosixPath(fields[3]),
                point=Path(fields[4]),
                writable="rw" in fields[5].split(",") and "ro" not in options,
            )
        )
    return tuple(found)


def hierarchy(
    mounts: Iterable[CgroupMount], version: int, controller: str = "freezer"
) -> tuple[CgroupMount, ...]:
    """The mounts of a v1 controller, or of v2; writable ones first."""
    fitting = [
        mount
        for mount in mounts
        if mount.version == version and (version == 2 or controller in mount.controllers)
    ]
    return tuple(sorted(fitting, key=lambda mount: not mount.writable))


def locate(
    mounts: Iterable[CgroupMount], version: int, path: PurePosixPath, controller: str = "freezer"
) -> Path | None:
    """Find the folder of a cgroup here; None when the mounts do not show it."""
    for mount in hierarchy(mounts, version, controller):
        if path.is_relative_to(mount.root):
            return mount.point / path.relative_to(mount.root)
    return None
