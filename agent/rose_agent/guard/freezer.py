"""What the guard does to an engine's process tree itself, when the engine host does not.

The tree is found through ``engine.json`` the way the host's own repair finds it: by its cgroup
where the hierarchy is mounted, else by the session, and only while that is still the same process.
Next step: ``rose_core.guard.ladder`` says when the guard has to do this itself.
"""

from __future__ import annotations

import logging

from rose_agent.host.errors import GroupError
from rose_agent.host.groups import ProcessGroup
from rose_agent.host.repair import find_group
from rose_engines.rundir import EngineFile, SlotDir, read_json

_log = logging.getLogger(__name__)


def trees(slot: SlotDir) -> list[ProcessGroup]:
    """The slot's process trees that can be found, including that of a second engine."""
    files = (read_json(folder.engine, EngineFile) for folder in (slot, slot.twin))
    found = (find_group(file) for file in files if file is not None and not file.dedicated)
    return [tree for tree in found if tree is not None]


def freeze(slot: SlotDir) -> str:
    """Freeze the tree.

    Returns:
        Why it did not work, or an empty string.
    """
    return _do(slot, "freeze")


def kill(slot: SlotDir) -> str:
    """End the tree, whether it is frozen or not.

    Returns:
        Why it did not work, or an empty string.
    """
    return _do(slot, "kill")


def _do(slot: SlotDir, what: str) -> str:
    found, errors = trees(slot), []
    if not found:
        return "no process tree of this slot is visible here"
    for tree in found:
        try:
            tree.freeze() if what == "freeze" else tree.kill()
        except GroupError as error:
            _log.warning("slot %s: cannot %s: %s", slot.uid, what, error)
            errors.append(str(error))
    return "; ".join(errors)


def frozen(slot: SlotDir) -> bool:
    """Whether the tree stands still."""
    found = trees(slot)
    return bool(found) and all(tree.frozen() for tree in found)


def cpu_ns(slot: SlotDir) -> int | None:
    """Processor time of the trees so far; None when it cannot be known."""
    used = [tree.cpu_ns() for tree in trees(slot)]
    return sum(filter(None, used)) if used and None not in used else None


def exists(slot: SlotDir) -> bool:
    """Whether any process of the trees lives."""
    return any(tree.pids() for tree in trees(slot))
