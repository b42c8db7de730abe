"""A record of one turn of a sandbox's trajectory, as a store keeps it.

Next step: ``record_store`` keeps them, ``records`` makes them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_weights.errors import Damaged
from rose_weights.store.store import Store


class SavedPart(msgspec.Struct, frozen=True):
    """A part of a sandbox.

    Attributes:
        digest: SHA-256 of the part.
        size: its bytes.
        pieces: (pack, start, size) that make it.
        packs: name of the block that holds each pack, compressed.
    """

    digest: str
    size: int
    pieces: tuple[tuple[str, int, int], ...]
    packs: dict[str, str]


class OutsideEffect(msgspec.Struct, frozen=True):
    """A request that left the sandbox; see ``rose_core.sandboxes.outside``."""

    turn: int
    method: str
    target: str
    status: int = 0
    keyed: bool = False


class Command(msgspec.Struct, frozen=True):
    """A command that has been run: asked again under its name, it is answered and not run."""

    name: str
    digest: str
    result: dict[str, Any]


class TurnRecord(msgspec.Struct, frozen=True):
    """One turn of a trajectory.

    Attributes:
        session, turn: whose, and its number from 1.
        tokens: digest of the ids, see ``digest_of``.
        ids: all token ids of the session up to here, as a part.
        weight_versions: that sampled them, in order.
        owner, fence: the host that published it, and under which fence.
        spec: of the sandbox: image, limits, folder, environment.
        files, processes: None: the bare image, no process.
        effects: that left the sandbox, of all turns up to here.
        commands: of this turn.
        history: the router's session up to here, as it exported it; None: it exported nothing.
        parent: (session, turn) that it was forked from.
    """

    session: str
    turn: int
    tokens: str
    owner: str
    fence: int
    spec: dict[str, Any]
    ids: SavedPart | None = None
    weight_versions: tuple[str, ...] = ()
    files: SavedPart | None = None
    processes: SavedPart | None = None
    effects: tuple[OutsideEffect, ...] = ()
    commands: tuple[Command, ...] = ()
    parent: tuple[str, int] | None = None
    history: SavedPart | None = None

    @property
    def parts(self) -> tuple[SavedPart, ...]:
        """Parts that the record has; absent ones are left out."""
        found = (self.ids, self.files, self.processes, self.history)
        return tuple(one for one in found if one is not None)

    def blocks(self) -> set[bytes]:
        """Names of all blocks it needs."""
        return {bytes.fromhex(name) for part in self.parts for name in part.packs.values()}


def read_record(store: Store, place: str, name: str) -> TurnRecord:
    """A listed record.

    Args:
        store: where.
        place: the store's run that holds the session.
        name: of the record.

    Raises:
        Damaged: it is gone or not what its name says.
    """
    return record_of(stored_record(store, place, name), name, place)


def stored_record(store: Store, place: str, name: str) -> bytes:
    """The same as it is stored, not checked.

    Raises:
        Damaged: it is gone.
    """
    try:
        return store.backend.manifest(place, name)
    except OSError as error:
        raise Damaged(f"record {name[:16]} of {place} cannot be read: {error}") from error


def record_of(data: bytes, name: str, whose: str) -> TurnRecord:
    """A record as it is stored, checked by its name.

    It is never encoded again for that: a record of before a field was added, or after, would have
    another name.

    Raises:
        Damaged: it is not what its name says.
    """
    if hashlib.sha256(data).hexdigest() != name:
        raise Damaged(f"record {name[:16]} of {whose} is not what the state lists")
    try:
        return msgspec.json.decode(data, type=TurnRecord)
    except UNREADABLE as error:
        raise Damaged(f"record {name[:16]} of {whose} cannot be read: {error}") from error
