"""What an engine host finds of its predecessor, and how it is cleaned up.

A host that was killed leaves engines behind, perhaps frozen, that nobody steers. Each is known by
``engine.json`` (pid with start time, cgroup) and by its cgroup's name. ``repair`` ends them all
before the host answers its first order; the guard then asks for what it still wants.
``thaw_all`` only lets them go on, so that the container runtime can end them: a pod whose v1
cgroup is frozen cannot be deleted.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path, PurePosixPath

from rose_agent.host import metrics
from rose_agent.host.cgroup_ids import through_the_node
from rose_agent.host.errors import GroupError
from rose_agent.host.freezers import Freezer, group
from rose_agent.host.groups import ProcessGroup, end
from rose_agent.host.mounts import locate, parse_mountinfo
from rose_agent.host.process import pid_namespace, start_ticks
from rose_core.wire.reasons import HostReason
from rose_engines.rundir import EngineFile, RunDir, SlotDir, read_json

_log = logging.getLogger(__name__)
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
    mounts = parse_mountinfo(mountinfo.read_text())
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
    """A number is the host's word alone: it must not lead the guard to another's cgroup."""
    return folder.name.startswith("rose-") and folder.is_dir()


def leftovers(rundir: RunDir, freezer: Freezer) -> tuple[ProcessGroup, ...]:
    """Every tree of an earlier host: recorded ones, and cgroups that bear our prefix."""
    found: dict[str, ProcessGroup] = {}
    for slot in rundir.all_slots():
        record = read_json(slot.engine, EngineFile)
        tree = find_group(record) if record is not None else None
        if tree is not None:
            found[str(tree.directory or slot.uid)] = tree
    for tree in freezer.strays():
        found.setdefault(str(tree.directory), tree)
    return tuple(found.values())


def repair(rundir: RunDir, freezer: Freezer, seconds: float = 10.0) -> int:
    """End what an earlier host left running and forget its slots.

    Permit files stay, closed by their readers' clocks: the guard may have them mapped. What a
    second engine calls its permit is only another name of such a file.

    Returns:
        How many trees still had processes.
    """
    repaired = 0
    for tree in leftovers(rundir, freezer):
        members = tree.pids()
        repaired += bool(members)
        with contextlib.suppress(GroupError):
            if not end(tree, seconds):
                _log.error("%s still runs: %s", tree.directory, tree.pids())
        if members:
            metrics.killed(HostReason.ORPHAN)
            _log.warning("ended %d processes of an earlier engine host", len(members))
    for slot in rundir.all_slots():
        forget_slot(slot, slot.is_twin)
    return repaired


def forget_slot(slot: SlotDir, permit: bool) -> None:
    """Remove a slot's files; its permit too, unless somebody may have it mapped."""
    if permit:
        shutil.rmtree(slot.folder, ignore_errors=True)
        return
    for path in (slot.engine, slot.weights, slot.plugin_socket, slot.slot):
        path.unlink(missing_ok=True)
    for folder in (slot.bundles, slot.own):
        shutil.rmtree(folder, ignore_errors=True)


def thaw_all(rundir: RunDir, freezer: Freezer) -> int:
    """Let every tree go on; returns how many there were."""
    trees = leftovers(rundir, freezer)
    for tree in trees:
        with contextlib.suppress(GroupError):
            tree.thaw()
    return len(trees)
