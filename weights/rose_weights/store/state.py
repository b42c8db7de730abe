"""What a store knows about a run: one small file that is replaced in one step.

``runs/<run>/state.json`` is the truth: a version exists when it is listed there. A ``places.Place``
replaces it in one step and only if it is still what was read, which makes a change of the head a
compare-and-swap.

States of a version and what moves it on:

| state | how it got there |
|---|---|
| staged | some of its blocks are in ``blocks/`` |
| written | all blocks durable, manifest durable; not listed, nobody sees it |
| published | listed and head: the state file was replaced |
| superseded | listed, a later version is head |
| folded | no longer listed: its change is part of a later delta |

A crash between two states leaves the earlier one; a publisher then sends what is missing and
commits again.
"""

from __future__ import annotations

import hashlib

import msgspec

from rose_core.identity import WeightVersion
from rose_core.unreadable import UNREADABLE
from rose_weights.errors import Damaged


class StoredVersion(msgspec.Struct, frozen=True):
    """One version the store keeps.

    Attributes:
        manifest: content address of its manifest.
        base: what the manifest starts from; None = full or bare.
        digest: of the whole state.
        step: the trainer's label.
        changes, elements: elements changed, and all there are.
        bytes: size of all blocks.
        full: the manifest is full, with blocks.
        on_base: content address of the same delta with blocks coded on their base; may be empty.
        encode_seconds: what comparing and encoding took its publisher; 0 = it did not say.
    """

    version: WeightVersion
    manifest: str
    base: WeightVersion | None
    digest: str
    step: int | None = None
    changes: int = 0
    elements: int = 0
    bytes: int = 0
    full: bool = False
    on_base: str = ""
    encode_seconds: float = 0.0


class ListedRecord(msgspec.Struct, frozen=True):
    """One turn of a sandbox's trajectory; ``records`` says what is in it.

    Attributes:
        turn: its number.
        manifest: content address of the record.
    """

    turn: int
    manifest: str


class RunState(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        run: its name.
        fence: the incarnation that may publish; older ones are refused.
        publisher: who opened it, for people.
        versions: kept versions, oldest first; the last one published is ``head``.
        head: None before the first publish.
        records: turns of a sandbox's trajectory, oldest first; unset in a run of weights, whose
            state of before has no such word under its ``check``.
        check: SHA-256 of the rest, where it is kept; empty in memory.
    """

    run: str
    fence: int = 0
    publisher: str = ""
    versions: tuple[StoredVersion, ...] = ()
    head: WeightVersion | None = None
    records: tuple[ListedRecord, ...] | msgspec.UnsetType = msgspec.UNSET
    check: str = ""

    @property
    def recorded(self) -> tuple[ListedRecord, ...]:
        """Its records; a run of weights has none."""
        return () if self.records is msgspec.UNSET else self.records

    def kept(self, version: WeightVersion | None) -> StoredVersion | None:
        """The entry of a version, or None."""
        return next((kept for kept in self.versions if kept.version == version), None)


def encode(state: RunState) -> bytes:
    """A state as it is kept."""
    return msgspec.json.encode(msgspec.structs.replace(state, check=_sum(state)))


def decode(data: bytes, where: str) -> RunState:
    """What ``encode`` wrote.

    Args:
        data: the bytes.
        where: they were, for people.

    Raises:
        Damaged: it is something else, or a bit of it has changed since.
    """
    try:
        found = msgspec.json.decode(data, type=RunState)
    except UNREADABLE as error:
        message = f"{where} is damaged: {error}; restore it from a backup"
        raise Damaged(message) from error
    if found.check not in {"", _sum(found)}:  # stores of before wrote none
        message = f"{where} is damaged: its content is not what it was; restore it from a backup"
        raise Damaged(message)
    return msgspec.structs.replace(found, check="")


def _sum(state: RunState) -> str:
    rest = msgspec.structs.replace(state, check="")
    return hashlib.sha256(msgspec.json.encode(rest)).hexdigest()
