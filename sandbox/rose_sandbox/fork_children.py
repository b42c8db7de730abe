"""What the children of a fork are called, and which of a named fork's there are already.

A fork with a name is made once, as a command with a name is run once: whoever asks again, because
the first answer did not reach him, is given the same children. So their sessions' names follow from
the fork's, and what there is of them is asked of the store, which all hosts of a run share.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Container, Mapping, Sequence

from rose_core.sandboxes.turns import SandboxClock
from rose_sandbox.box import BoundTokens, Box
from rose_sandbox.errors import AlreadyThere
from rose_sandbox.recorded import read_effect
from rose_weights.store.records import Records, TurnRecord

Taken = Mapping[str, int | None]
"""Children with the fence that each is taken under; None: its name was drawn, and nobody has it."""


def draw_name() -> str:
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
        name = f"{stem}-{draw_name()}"
        if name not in taken and not records.turns(name):
            names[name] = None
    return list(names)


def find_missing(
    records: Records, session: str, names: Sequence[str], turn: int | None
) -> tuple[int | None, dict[str, int]]:
    """The turn of a named fork, and those of its children that there are not yet.

    Args:
        records: of the run.
        session: the parent.
        names: of all its children.
        turn: that is asked for; None: the newest, or that of the children that there are.

    Returns:
        The turn, and each missing child with the fence that it is taken under: a host that has made
        it meanwhile keeps it.

    Raises:
        AlreadyThere: the fork of that name was of another turn, or a session that is no child has
            the name of one.
    """
    there, absent = {}, {}
    for name in names:
        fence = records.fence(name)  # before its turns: whoever makes it in between has a newer one
        if not records.turns(name):
            absent[name] = fence
            continue
        parent = records.read(name).parent
        if parent is None or parent[0] != session:
            raise AlreadyThere(f"session {name} is no child of {session}; name this fork anew")
        there[name] = parent[1]
    at = next(iter(there.values()), turn)
    if turn not in {None, at}:
        raise AlreadyThere(f"the fork with child {names[0]} was of turn {at}; name this one anew")
    return at, absent


def find_ending(
    names: Taken, made: Sequence[BaseException | None], here: Container[str]
) -> list[str]:
    """Which children end where one of them has failed.

    Of a fork without a name all. Of one with a name another host may have told of those that were
    made, or have made those that it took meanwhile: only what failed at this host ends.

    Args:
        names: of the children.
        made: how each of them failed; None: it did not.
        here: sessions with a sandbox at this host.
    """
    return [
        name
        for (name, fence), error in zip(names.items(), made, strict=True)
        if fence is None or (error is not None and name in here)
    ]


def revive(record: TurnRecord, going_on: BoundTokens, made: Box) -> Box:
    """A sandbox that stands where the record does, and goes on from these tokens."""
    made.clock = SandboxClock(turn=record.turn, saved=record.turn)
    made.bind(going_on)
    made.received = going_on.ids
    made.effects = tuple(read_effect(one) for one in record.effects)
    made.commands = {one.name: one for one in record.commands}
    return made
