"""What the guard does to an engine's process tree itself, when the engine host does not.

The tree is found through ``engine.json`` the way the host's own repair finds it: by its cgroup
where the hierarchy is mounted, else by the session, and only while that is still the same process.
"""

from __future__ import annotations

import logging

from rose_agent.host.errors import GroupError
from rose_agent.host.groups import ProcessGroup
from rose_agent.host.repair import find_group
from rose_engines.rundir import EngineFile, SlotDir, read_json

_log = logging.getLogger(__name__)


def tree(slot: SlotDir) -> ProcessGroup | None:
    """The slot's process tree; None when there is none (any more) that we can name."""
    file = read_json(slot.engine, EngineFile)
    return find_group(file) if file is not None and not file.dedicated else None


def freeze(slot: SlotDir) -> str:
    """Freeze the tree.

    Returns:
        Why it did not work, or an empty string.
    """
    return _do(slot, "freeze")


def kill(slot: SlotDir) -> str:
    """End the tree, frozen or not; the kill order is the group's.

    Returns:
        Why it did not work, or an empty string.
    """
    return _do(slot, "kill")


def _do(slot: SlotDir, what: str) -> str:
    found = tree(slot)
    if found is None:
        return "no process tree of this slot is visible here"
    try:
        found.freeze() if what == "freeze" else found.kill()
    except GroupError as error:
        _log.warning("slot %s: cannot %s: %s", slot.uid, what, error)
        return str(error)
    return ""


def frozen(slot: SlotDir) -> bool:
    """Whether the tree stands still."""
    found = tree(slot)
    return found is not None and found.frozen()


def cpu_ns(slot: SlotDir) -> int | None:
    """Processor time of the tree so far; None when it cannot be known."""
    found = tree(slot)
    return found.cpu_ns() if found is not None else None


def exists(slot: SlotDir) -> bool:
    """Whether any process of the tree lives."""
    found = tree(slot)
    return found is not None and bool(found.pids())
