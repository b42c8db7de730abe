"""What the children of a fork are called, and which of a named fork's there are already.

A fork with a name is made once, as a command with a name is run once: whoever asks again, because
the first answer did not reach him, is given the same children. So their sessions' names follow from
the fork's, and what there is of them is asked of the store, which all hosts of a run share.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Container, Sequence

from rose_sandbox.errors import AlreadyThere
from rose_weights.store.records import Records


def draw() -> str:
    """What tells children of one turn apart."""
    return uuid.uuid4().hex[:12]


def names_of(session: str, fork: str, n: int) -> tuple[str, ...]:
    """Sessions of a named fork's children."""
    digests = (hashlib.sha256(f"{fork}/{number}".encode()).hexdigest() for number in range(n))
    return tuple(f"{session}.{digest[:24]}" for digest in digests)


def new_names(records: Records, stem: str, n: int, taken: Container[str]) -> list[str]:
    """Of children whose fork has no name: each once, and no session's that there is or was."""
    names: dict[str, None] = {}
    while len(names) < n:
        name = f"{stem}-{draw()}"
        if name not in taken and not records.turns(name):
            names[name] = None
    return list(names)


def missing(
    records: Records, names: Sequence[str], turn: int | None
) -> tuple[int | None, tuple[str, ...]]:
    """The turn of a named fork, and those of its children that there are not yet.

    Args:
        records: of the run.
        names: of all its children.
        turn: that is asked for; None: the newest, or that of the children that there are.

    Raises:
        AlreadyThere: the fork of that name was of another turn.
    """
    there = {}
    for name in names:
        if records.turns(name) and (parent := records.read(name).parent) is not None:
            there[name] = parent[1]
    at = next(iter(there.values()), turn)
    if turn not in {None, at}:
        raise AlreadyThere(f"the fork with child {names[0]} was of turn {at}; name this one anew")
    return at, tuple(one for one in names if one not in there)
