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

from rose_agent.errors import GroupError
from rose_agent.host import metrics
from rose_agent.os.find_group import find_group
from rose_agent.os.freezers import Freezer
from rose_agent.os.groups import ProcessGroup, end
from rose_core.host_reasons import HostReason
from rose_engines.node.rundir import EngineFile, RunDir, SlotDir, read_json

_log = logging.getLogger(__name__)


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
            metrics.count_kill(HostReason.ORPHAN)
            _log.warning("ended %d processes of an earlier engine host", len(members))
    for slot in rundir.all_slots():
        forget_slot(slot, slot.is_twin)
    return repaired


def forget_slot(slot: SlotDir, permit: bool) -> None:
    """Remove a slot's files; its permit too, unless another process may have it mapped."""
    if permit:
        shutil.rmtree(slot.folder, ignore_errors=True)
        return
    for path in (slot.engine, *slot.every_weights(), slot.plugin_socket, slot.slot):
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
