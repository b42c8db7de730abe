"""What the guard does to an engine's process tree itself, when the engine host does not.

The tree is found through ``engine.json`` the way the host's own repair finds it: by its cgroup
where the hierarchy is mounted, else by the session, and only while that is still the same process.
An engine that works in its driver is frozen by the same rule as the host's (``freezing``).
Next step: ``rose_core.guard.ladder`` says when the guard has to do this itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rose_agent.errors import GroupError
from rose_agent.os.find_group import find_group
from rose_agent.os.groups import ProcessGroup
from rose_core.guard.freezing import Activity, FreezeStep, next_step
from rose_engines.node import activity
from rose_engines.node.rundir import EngineFile, SlotDir, read_json

_log = logging.getLogger(__name__)
_INVISIBLE = "no process tree of this slot is visible here"


def trees(slot: SlotDir) -> list[ProcessGroup]:
    """The slot's process trees that can be found, including that of a second engine."""
    found = (_tree(folder) for folder in (slot, slot.twin))
    return [tree for tree in found if tree is not None]


def _tree(folder: SlotDir) -> ProcessGroup | None:
    file = read_json(folder.engine, EngineFile)
    return find_group(file) if file is not None and not file.dedicated else None


def freeze(slot: SlotDir, stopped_ns: int, *, hurried: bool = False) -> str:
    """Freeze the trees, or end those that start and do not come to rest.

    Args:
        slot: whose.
        stopped_ns: time since it may not compute.
        hurried: the host is gone, so nobody else would stop it in time.

    Returns:
        Why it did not work, or an empty string.
    """
    messages = (_freeze(folder, stopped_ns, hurried) for folder in (slot, slot.twin))
    found = [message for message in messages if message is not None]
    return "; ".join(filter(None, found)) if found else _INVISIBLE


def _freeze(folder: SlotDir, stopped_ns: int, hurried: bool) -> str | None:
    tree = _tree(folder)
    if tree is None:
        return None
    step = next_step(Activity(activity.read(folder.activity)), stopped_ns, hurried=hurried)
    if step is FreezeStep.WAIT:
        return "it works in its driver, and rests at its next boundary or checkpoint"
    return _act(folder, tree.kill if step is FreezeStep.END else tree.freeze)


def kill(slot: SlotDir) -> str:
    """End the tree, whether it is frozen or not.

    Returns:
        Why it did not work, or an empty string.
    """
    found = trees(slot)
    return (
        "; ".join(filter(None, (_act(slot, tree.kill) for tree in found))) if found else _INVISIBLE
    )


def _act(slot: SlotDir, what: Callable[[], None]) -> str:
    try:
        what()
    except GroupError as error:
        _log.warning("slot %s: %s", slot.uid, error)
        return str(error)
    return ""


def is_frozen(slot: SlotDir) -> bool:
    """Whether the tree stands still."""
    found = trees(slot)
    return bool(found) and all(tree.is_frozen() for tree in found)


def cpu_ns(slot: SlotDir) -> int | None:
    """Processor time of the trees so far; None when it cannot be known."""
    used = [tree.cpu_ns() for tree in trees(slot)]
    return sum(filter(None, used)) if used and None not in used else None


def exists(slot: SlotDir) -> bool:
    """Whether any process of the trees lives."""
    return any(tree.pids() for tree in trees(slot))
