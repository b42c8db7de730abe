"""Records of agents' trajectories: tokens, files, processes and effects of one turn, in one step.

A session is a run of the store of its own, so it has a fence, a state that is replaced in one step
and rights. A record is there when the state lists it, and not before:

| state | how it got there |
|---|---|
| staged | its packs are blocks |
| written | packs and the record durable; not listed, nobody sees it |
| published | listed: the state was replaced |
| left | no longer listed: the trajectory went back before it |

A crash between two states leaves the record before. Whoever restores a session owns it from then
on: the host before is fenced, and what it still publishes is refused.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from rose_core.sandboxes.pages import PACK, Data, PackPiece, TornPart, pack, pages, unpack
from rose_weights.errors import Damaged, Incomplete, UnknownVersion
from rose_weights.store.record import Command, OutsideEffect, SavedPart, TurnRecord
from rose_weights.store.record_store import RecordStore, StoredRecords, check_fence, unknown_turn
from rose_weights.store.store import Store

__all__ = [
    "Command",
    "OutsideEffect",
    "OwnedSession",
    "PublishedTurn",
    "Records",
    "SavedPart",
    "TurnRecord",
    "digest_of",
    "mapped",
]

PACKS = 16
"""Packs that a part is read from at most, beyond those of one that is stored whole; past that it is
stored whole: a restore reads each."""
_HELD = 8
"""Packs in memory at a time while a part is read."""
_FAST = 1
"""Of zlib: pages of zeros and text shrink to a quarter, at a speed above the disk's."""


@dataclass(frozen=True)
class PublishedTurn:
    """What is published of a turn.

    Attributes:
        number: from 1.
        ids: token ids of the session so far.
        spec: of the sandbox.
        files, processes: new parts, best as they lie in files; None: as in the record before.
        weight_versions, effects, commands, parent: as in ``TurnRecord``.
        history: of the router; None: as in the record before.
    """

    number: int
    ids: tuple[int, ...]
    spec: Mapping[str, Any]
    files: Data | None = None
    processes: Data | None = None
    weight_versions: tuple[str, ...] = ()
    effects: tuple[OutsideEffect, ...] = ()
    commands: tuple[Command, ...] = ()
    parent: tuple[str, int] | None = None
    history: bytes | None = None


@dataclass
class OwnedSession:
    """A session that this host may publish.

    Attributes:
        session, fence: whose, and under which fence.
        last: its newest record; None before the first.
        known: where pages of the newest parts lie, by part; lost with the host, then read again.
        written: bytes that its records needed so far.
        lost: a block that its records point to is gone: the next one points to none of them, and so
            must have all parts.
    """

    session: str
    owner: str
    fence: int
    last: TurnRecord | None = None
    known: dict[str, Mapping[bytes, PackPiece]] = field(default_factory=dict)
    written: int = 0
    lost: bool = False


@contextmanager
def mapped(file: Path) -> Iterator[Data]:
    """A part as it lies in a file.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        if not file.stat().st_size:  # nothing cannot be mapped
            yield b""
            return
        with mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            yield data


def digest_of(ids: Iterable[int]) -> str:
    """Of token ids: SHA-256 of each as 4 bytes, little-endian."""
    return hashlib.sha256(_encoded(ids)).hexdigest()


def _encoded(ids: Iterable[int]) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in ids)


class Records:
    """The records of one run's sandboxes. Blocking; hosts call it in threads.

    Args:
        store: where; a ``RecordStore`` that is far asks whether its caller may (``record_client``).
        run: whose; its rights hold for its sandboxes too.
    """

    def __init__(self, store: Store | RecordStore, run: str) -> None:
        self._store: RecordStore = StoredRecords(store) if isinstance(store, Store) else store
        self._run = run

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def claim(self, session: str, owner: str, expected_fence: int | None = None) -> OwnedSession:
        """Take a session over, or begin it: every host before is fenced from here on.

        Args:
            session: to take over.
            owner: name of this host.
            expected_fence: under which the caller saw it (``fence``); None: whichever it has.

        Raises:
            Fenced: another host has taken it over since the caller looked; nothing has changed.
            StoreFailed: the fence could not be written; nothing has changed.
            Damaged: the newest record cannot be read.
        """
        state = self._store.claim(self._run, session, owner, expected_fence)
        last = self._store.read(self._run, session, state.turns[-1][1]) if state.turns else None
        return OwnedSession(session, owner, state.fence, last)

    def check(self, owned: OwnedSession) -> None:
        """Whether the session is still this host's.

        Raises:
            Fenced: another host has taken it over.
        """
        check_fence(self._store.session_state(self._run, owned.session), owned.session, owned.fence)

    def fence(self, session: str) -> int:
        """Under which a session is held now; 0: nobody has begun it."""
        return self._store.session_state(self._run, session).fence

    def turns(self, session: str) -> tuple[int, ...]:
        """Turns with a record, in order; none of an unknown session."""
        return tuple(turn for turn, _ in self._store.session_state(self._run, session).turns)

    def read(self, session: str, turn: int | None = None) -> TurnRecord:
        """A turn's record, the newest one without a turn.

        Raises:
            UnknownVersion: there is none; the text says which there are.
            Damaged: it cannot be read.
        """
        there = self._store.session_state(self._run, session)
        for one, name in reversed(there.turns):
            if turn is None or one == turn:
                return self._store.read(self._run, session, name)
        raise unknown_turn(session, turn, there)

    def part(self, part: SavedPart) -> bytes:
        """The bytes of a record's part; for small ones.

        Raises:
            Incomplete, Damaged: a block is missing, or the part is not what the record says.
        """
        return b"".join(self._pieces(part))

    def part_into(self, part: SavedPart, file: Path) -> None:
        """Write a record's part into a file, of which little is in memory at a time.

        Raises:
            Incomplete, Damaged: as ``part``; the file then holds what came before.
        """
        with file.open("wb") as out:
            for piece in self._pieces(part):
                out.write(piece)

    def _pieces(self, part: SavedPart) -> Iterator[bytes]:
        @lru_cache(maxsize=_HELD)
        def fetch(name: str) -> bytes:
            block = part.packs.get(name)
            if block is None:
                raise TornPart(f"pack {name[:16]} of the record is missing")
            return zlib.decompress(self._store.block(self._run, bytes.fromhex(block)))

        try:
            yield from unpack((PackPiece(*one) for one in part.pieces), fetch, part.digest)
        except (TornPart, zlib.error) as error:
            raise Damaged(f"part {part.digest[:16]} cannot be read: {error}") from error

    @contextmanager
    def _mapped(self, part: SavedPart) -> Iterator[Data]:
        with TemporaryDirectory() as folder:
            self.part_into(part, file := Path(folder) / "part")
            with mapped(file) as data:
                yield data

    def ids(self, record: TurnRecord) -> tuple[int, ...]:
        """The token ids of the session up to the record.

        Raises:
            Damaged: they are not those that the record's digest was made of.
        """
        data = self.part(record.ids) if record.ids is not None else b""
        if hashlib.sha256(data).hexdigest() != record.tokens:
            raise Damaged(f"turn {record.turn} of {record.session} is bound to other tokens")
        return tuple(int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4))

    def history(self, record: TurnRecord) -> bytes:
        """The router's session up to the record, as it exported it; empty: it exported nothing.

        Raises:
            Incomplete, Damaged: as ``part``.
        """
        return self.part(record.history) if record.history is not None else b""

    def publish(self, owned: OwnedSession, turn: PublishedTurn) -> TurnRecord:
        """Make a record the session's newest; later turns, if any, are left.

        Raises:
            Fenced: another host has taken the session over; nothing has changed.
            Incomplete, Damaged: a block of the record before is lost or broken; the next call needs
                all parts.
            StoreFailed: the disk is full or broken; the record before stands.
        """
        try:
            record, fresh = self._put(owned, turn)
        except (Incomplete, Damaged):
            # Also while the record before is read again: who has no index needs its blocks for it.
            owned.lost, owned.known = True, {}
            raise
        owned.last, owned.lost = record, False
        owned.known.update(fresh)
        return record

    def _put(
        self, owned: OwnedSession, turn: PublishedTurn
    ) -> tuple[TurnRecord, dict[str, Mapping[bytes, PackPiece]]]:
        """Save the parts of a turn and publish its record; returns where their pages lie."""
        before = None if owned.lost else owned.last
        ids = _encoded(turn.ids)
        fresh: dict[str, Mapping[bytes, PackPiece]] = {}
        parts: dict[str, SavedPart | None] = {}
        given = (
            *(("ids", ids), ("files", turn.files)),
            *(("processes", turn.processes), ("history", turn.history)),
        )
        for name, data in given:
            earlier: SavedPart | None = getattr(before, name) if before is not None else None
            if data is None:
                parts[name] = earlier
            else:
                parts[name], fresh[name] = self._save(owned, name, data, earlier)
        record = TurnRecord(
            owned.session,
            turn.number,
            hashlib.sha256(ids).hexdigest(),
            owned.owner,
            owned.fence,
            dict(turn.spec),
            weight_versions=turn.weight_versions,
            effects=turn.effects,
            commands=turn.commands,
            parent=turn.parent,
            **parts,
        )
        self._commit(owned, record)
        return record, fresh

    def adopt(self, owned: OwnedSession, record: TurnRecord, at: tuple[str, int]) -> TurnRecord:
        """Begin a session with another's record: a fork; no part is copied.

        Raises:
            Fenced, StoreFailed: as ``publish``.
        """
        made = msgspec.structs.replace(
            record, session=owned.session, owner=owned.owner, fence=owned.fence, parent=at
        )
        self._commit(owned, made)
        owned.last = made
        return made

    def note(self, owned: OwnedSession, effect: OutsideEffect) -> None:
        """Write down an effect before it happens, so that the loss of the host does not hide it.

        Raises:
            Fenced, StoreFailed: it must not happen.
        """
        if owned.last is None:
            raise UnknownVersion(f"session {owned.session} has no record that could hold it")
        noted = (*owned.last.effects, effect)
        self._commit(owned, made := msgspec.structs.replace(owned.last, effects=noted))
        owned.last = made

    def back(
        self, owned: OwnedSession, turn: int, effects: tuple[OutsideEffect, ...] | None = None
    ) -> TurnRecord:
        """Make an earlier record the newest one: later turns are left.

        Args:
            owned: the session.
            turn: of the record.
            effects: that happened, also those that are gone back across; None: the record's.

        Raises:
            UnknownVersion, Fenced, StoreFailed: nothing has changed.
        """
        record = self.read(owned.session, turn)
        made = msgspec.structs.replace(
            record,
            owner=owned.owner,
            fence=owned.fence,
            effects=record.effects if effects is None else effects,
        )
        self._commit(owned, made)
        owned.last, owned.known = made, {}
        return made

    def forget(self, owned: OwnedSession) -> None:
        """The session is over: its blocks are free for the store's sweep.

        Raises:
            Fenced: another host has taken it over; nothing has changed.
        """
        self._store.forget(self._run, owned.session, owned.fence)

    def _save(
        self, owned: OwnedSession, name: str, data: Data, earlier: SavedPart | None
    ) -> tuple[SavedPart, Mapping[bytes, PackPiece]]:
        known = owned.known.get(name, {})
        if earlier is not None and not known:
            with self._mapped(earlier) as before:
                known = pages((PackPiece(*one) for one in earlier.pieces), before)
        if earlier is not None and len(earlier.packs) >= PACKS + len(data) // PACK:
            known = {}
        blocks = dict(earlier.packs) if earlier is not None else {}

        def put(pack_name: str, content: bytes) -> None:
            packed = zlib.compress(content, _FAST)
            staged = self._store.put(self._run, owned.session, owned.fence, packed)
            blocks[pack_name] = staged.hex()
            owned.written += len(packed)

        made = pack(data, known, put)
        used = {piece.pack: blocks[piece.pack] for piece in made.pieces}
        pieces = tuple((one.pack, one.start, one.size) for one in made.pieces)
        return SavedPart(hashlib.sha256(data).hexdigest(), len(data), pieces, used), made.known

    def _commit(self, owned: OwnedSession, record: TurnRecord) -> None:
        data = msgspec.json.encode(record)
        self._store.commit(self._run, owned.session, owned.fence, data)
        owned.written += len(data)
