"""Finds the process group of an engine that a host recorded, from whatever container asks.

Next step: the guard's ``freezer`` stops what it finds when the host does not; the host's ``repair``
ends what its predecessor left.
"""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath

from rose_agent.os.cgroup_ids import through_the_node
from rose_agent.os.freezers import group
from rose_agent.os.groups import ProcessGroup
from rose_agent.os.mounts import locate, parse_mountinfo
from rose_agent.os.processes import pid_namespace, start_ticks
from rose_engines.node.rundir import EngineFile

_VERSIONS = {"v1": 1, "v2": 2}


def find_group(
    record: EngineFile, mountinfo: Path = Path("/proc/self/mountinfo")
) -> ProcessGroup | None:
    """The tree that ``engine.json`` names, as this process can reach it.

    Works in another container than the host's, as long as the cgroup hierarchy is mounted there.
    Without a cgroup it needs the host's pid namespace.

    Returns:
        None when the tree cannot be reached from here, or is known to be gone.
    """
    version = _VERSIONS.get(record.cgroup_version)
    if version is not None:
        directory = _directory(record, version, mountinfo)
        return group(record.cgroup_version, directory, 0) if directory is not None else None
    if not record.pids or record.pid_namespace != pid_namespace():
        return None
    # The kernel gives no process the number of a session that still has members: a leader that
    # is gone still names its session, another process under its pid means the session is over.
    same = start_ticks(record.pids[0]) in {0, record.start_ticks}
    return group("signals", None, record.pids[0]) if same else None


def _directory(record: EngineFile, version: int, mountinfo: Path) -> Path | None:
    """The cgroup by its path; else, from another cgroup namespace, by its number."""
    mounts = parse_mountinfo(mountinfo.read_text(errors="replace"))
    named = PurePosixPath(record.cgroup_path)
    directory = locate(mounts, version, named) if record.cgroup_path else Path(record.cgroup)
    if directory is not None and directory.is_dir():
        return directory
    number = record.cgroup_number
    if version == 1 or not number:
        return None
    with contextlib.suppress(OSError):
        # Where host and guard mount the node's hierarchy at the same place.
        if _is_engines(same := Path(record.cgroup)) and same.stat().st_ino == number:
            return same
    found = through_the_node(mounts, number)
    return found if found is not None and _is_engines(found) else None


def _is_engines(folder: Path) -> bool:
    """A number is only what the host claims: it must not lead the guard to another's cgroup."""
    return folder.name.startswith("rose-") and folder.is_dir()
