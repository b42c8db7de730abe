"""Where records of sandboxes are kept: the rules of ``records``, as a store keeps them.

A session is a run of the store whose name no publisher of weights may use. What is asked here names
the run of the *weights* and the session, so a proxy in front of it can ask whether the caller may
keep records of that run.

| asked | refused when |
|---|---|
| ``claim`` | it is to be taken over as it was seen, and another host has taken it over since |
| ``put`` | the session is another host's: ``Fenced`` |
| ``commit`` | likewise; it is of another session; a block is none that the run's hosts staged |
| ``read`` | the session lists no such record |
| ``block`` | the run has no such block |

A block is named by its content, and to know the name of one must not be enough to have it. So each
run's lie apart from other runs' and from weights, and nothing that is asked about those finds them.
Inside a run every host may take over every session, so they share blocks. Next step: ``records``
decides what is asked.
"""

from __future__ import annotations

import hashlib
import re
from typing import Protocol

import msgspec

from rose_core.identity import run_name
from rose_core.unreadable import UNREADABLE
from rose_weights.errors import BadManifest, Damaged, Fenced, UnknownRun, UnknownVersion
from rose_weights.messages import SessionState
from rose_weights.store.record import TurnRecord, read_record, stored_record
from rose_weights.store.state import ListedRecord, RunState
from rose_weights.store.store import Store

_PLACE = re.compile(r"\.box-[0-9a-f]{16}")


def place_of(run: str, session: str) -> str:
    """The store's run that holds a session of a run.

    Raises:
        UnknownRun: no run is called so. With a slash, one would have another's sessions.
    """
    try:
        run_name(run)
    except ValueError as error:
        raise UnknownRun(str(error)) from error
    # Of the whole name of the run: two may begin alike, and neither may read the other's.
    digest = hashlib.sha256(f"{run}/{session}".encode()).hexdigest()
    return f"{run[:40].rstrip('-.')}.box-{digest[:16]}"


def is_place(run: str) -> bool:
    """Whether a run of the store holds a session, and no weights."""
    return _PLACE.fullmatch(run[-21:]) is not None


class RecordStore(Protocol):
    """What ``Records`` needs of a store, near or far. Blocking.

    Each may raise ``StoreFailed``; one that is far also ``Forbidden``.
    """

    def claim(
        self, run: str, session: str, owner: str, expected_fence: int | None = None
    ) -> SessionState:
        """Take a session over, or begin it: every host before is fenced.

        Args:
            run: of the session.
            session: to take over.
            owner: name of the host.
            expected_fence: the fence that it must still have; None: whichever.

        Raises:
            Fenced: another host has taken it over since it had that fence; nothing has changed.
        """

    def session_state(self, run: str, session: str) -> SessionState:
        """How a session stands; one that nobody has begun has the fence 0."""

    def read(self, run: str, session: str, name: str) -> TurnRecord:
        """A record of the session.

        Raises:
            Damaged: there is none of that name, or it cannot be read.
        """

    def block(self, run: str, name: bytes) -> bytes:
        """A block of the run's records.

        Raises:
            Incomplete, Damaged: the run has none of that name, or its bytes have changed.
        """

    def put(self, run: str, session: str, fence: int, data: bytes) -> bytes:
        """Stage a block; returns its name.

        Raises:
            Fenced: another host has the session.
        """

    def commit(self, run: str, session: str, fence: int, data: bytes) -> SessionState:
        """Make a record, as it is encoded, the session's newest; later turns are left.

        Raises:
            Fenced: another host has the session; nothing has changed.
            Incomplete: a block is not among the run's.
            BadManifest: it is no record of this session.
        """

    def forget(self, run: str, session: str, fence: int) -> SessionState:
        """The session is over: its blocks are free for the store's sweep.

        Raises:
            Fenced: another host has the session; nothing has changed.
        """

    def close(self) -> None:
        """Let go of it."""


class StoredRecords:
    """Records in a store of this process.

    Args:
        store: where.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def claim(
        self, run: str, session: str, owner: str, expected_fence: int | None = None
    ) -> SessionState:
        """See ``RecordStore``."""

        def as_seen(state: RunState) -> None:
            if expected_fence is not None:
                check_fence(_session_state(state), session, expected_fence)

        return _session_state(self._store.open_incarnation(place_of(run, session), owner, as_seen))

    def session_state(self, run: str, session: str) -> SessionState:
        """See ``RecordStore``."""
        place = place_of(run, session)
        try:
            return _session_state(self._store.state(place))
        except UnknownRun:
            return SessionState()

    def read(self, run: str, session: str, name: str) -> TurnRecord:
        """See ``RecordStore``."""
        return read_record(self._store, place_of(run, session), name)

    def stored(self, run: str, session: str, name: str) -> bytes:
        """A record as it is stored: who asked from afar checks it by its name.

        Raises:
            Damaged: the session lists none of that name, or it is gone.
        """
        if name not in (listed for _, listed in self.session_state(run, session).turns):
            raise Damaged(f"record {name[:16]} is none that session {session} lists")
        return stored_record(self._store, place_of(run, session), name)

    def block(self, run: str, name: bytes) -> bytes:
        """See ``RecordStore``."""
        return self._store.record_blocks(run).get(name)

    def put(self, run: str, session: str, fence: int, data: bytes) -> bytes:
        """See ``RecordStore``."""
        check_fence(self.session_state(run, session), session, fence)
        return self._store.put_record_block(run, data)

    def commit(self, run: str, session: str, fence: int, data: bytes) -> SessionState:
        """See ``RecordStore``."""
        record = _decoded(data, session, fence)
        listed = ListedRecord(record.turn, hashlib.sha256(data).hexdigest())

        def list_(state: RunState) -> RunState:
            check_fence(_session_state(state), session, fence)
            kept = tuple(one for one in state.recorded if one.turn < record.turn)
            return msgspec.structs.replace(state, records=(*kept, listed))

        place = place_of(run, session)
        return _session_state(self._store.commit_record(run, place, data, record.blocks(), list_))

    def forget(self, run: str, session: str, fence: int) -> SessionState:
        """See ``RecordStore``."""

        def empty(state: RunState) -> RunState:
            check_fence(_session_state(state), session, fence)
            return msgspec.structs.replace(state, records=())

        return _session_state(self._store.change(place_of(run, session), empty, "forget"))

    def close(self) -> None:
        """See ``RecordStore``; a store of this process needs none."""


def _session_state(state: RunState) -> SessionState:
    turns = tuple((one.turn, one.manifest) for one in state.recorded)
    return SessionState(state.fence, state.publisher, turns)


def check_fence(state: SessionState, session: str, fence: int) -> None:
    """Whether a session is still the host's that took it over under ``fence``.

    Raises:
        Fenced: another host has taken it over since.
    """
    if state.fence != fence:
        raise Fenced(
            f"session {session} is {state.owner}'s under fence {state.fence}; this host "
            f"had {fence} and must end its sandbox"
        )


def _decoded(data: bytes, session: str, fence: int) -> TurnRecord:
    try:
        record = msgspec.json.decode(data, type=TurnRecord)
        record.blocks()
    except (*UNREADABLE, ValueError) as error:
        raise BadManifest(f"this is no record of {session}: {error}") from error
    if (record.session, record.fence) != (session, fence):
        raise BadManifest(
            f"a record of {record.session} under fence {record.fence} is none of {session} under "
            f"{fence}"
        )
    return record


def unknown_turn(session: str, turn: int | None, there: SessionState) -> UnknownVersion:
    """The error for a turn that has no record."""
    turns = ", ".join(str(one) for one, _ in there.turns) or "none"
    wanted = "any turn" if turn is None else f"turn {turn}"
    return UnknownVersion(f"no record of {wanted} of session {session}; there are: {turns}")
