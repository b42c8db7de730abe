"""``guard.json``: what the guard must know at once after a restart.

The highest leader term it has obeyed (so that a deposed planner stays deposed) and the pool
policies last heard (so that it protects serving before the operator answers). Next step: ``loop``
loads it at the start and saves it after each answer of the operator.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rose_core.wire.sync import PoolPolicy
from rose_engines.node.rundir import read_json, write_json


class GuardFile(msgspec.Struct, frozen=True):
    """Content of the file."""

    highest_term: int = 0
    pools: tuple[PoolPolicy, ...] = ()


def load(path: Path) -> GuardFile:
    """Read it; a missing or damaged file is an empty one."""
    return read_json(path, GuardFile) or GuardFile()


def save(path: Path, state: GuardFile) -> str:
    """Write it; a full folder must not stop the guard.

    Returns:
        Why it could not be written; empty when it was.
    """
    try:
        write_json(path, state)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""
