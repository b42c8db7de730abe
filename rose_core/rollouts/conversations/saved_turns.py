"""A conversation's turns as bytes: what a router gives a sandbox's record, and takes back.

Earlier turns stand first and never change, so a record that stores pages shares them with the
record before. Next step: ``MessageTree.adopt`` gives them to a session.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from itertools import zip_longest
from typing import Annotated

import msgspec

from rose_core.rollouts.conversations.message_tree import Routing, TurnNode
from rose_core.rollouts.transcripts.spans import TokenSpan
from rose_core.unreadable import UNREADABLE

FORMAT = 1
MOST_BYTES = 16 * 1024 * 1024
"""A conversation that is longer is not exported: a million tokens with their log-probs."""
MOST_TURNS = 1 << 13
"""Nor is one of more turns; a router of the usual size keeps no longer one either."""


class NotReadable(ValueError):
    """Bytes that are no conversation of this format."""


class _Turn(msgspec.Struct, array_like=True):
    rid: str
    given: bytes
    sampled: bytes
    logprobs: bytes
    spans: tuple[TokenSpan, ...]
    finish: str
    semantics: str
    digest: bytes
    path: tuple[bytes, ...]
    altered_at: int | None
    routing: tuple[bytes, int, int, int] | None = None


class _Saved(msgspec.Struct, array_like=True):
    format: int
    roots: tuple[bytes, ...]
    turns: Annotated[tuple[_Turn, ...], msgspec.Meta(max_length=MOST_TURNS)]
    # Last, or a fork's turns would not stand where its parent's stand.
    session: str = ""
    inherited: bytes = b""


def to_bytes(turns: Sequence[TurnNode], roots: Iterable[bytes]) -> bytes:
    """A conversation; empty where it is too long."""
    if len(turns) > MOST_TURNS:
        return b""
    saved = tuple(
        _Turn(
            *(one.rid, _raw(one.given), _raw(one.sampled), _raw(one.logprobs), one.spans),
            *(one.finish, one.semantics, one.digest, one.path, one.altered_at),
            None if one.routing is None else astuple(one.routing),
        )
        for one in turns
    )
    if not saved:
        return b""
    session, inherited = turns[-1].owner[1], bytes(one.inherited for one in turns)
    data = msgspec.msgpack.encode(_Saved(FORMAT, tuple(sorted(roots)), saved, session, inherited))
    return data if len(data) <= MOST_BYTES else b""


def of_bytes(data: bytes) -> tuple[list[TurnNode], tuple[bytes, ...]]:
    """A conversation's turns and roots; their owner is the session that was saved, of no job.

    Raises:
        NotReadable: it is none, or longer than any that is exported.
    """
    if len(data) > MOST_BYTES:
        raise NotReadable(f"the saved conversation has {len(data)} bytes, over {MOST_BYTES}")
    try:
        saved = msgspec.msgpack.decode(data, type=_Saved)
    except UNREADABLE as error:
        raise NotReadable(f"the saved conversation cannot be read: {error}") from error
    if saved.format != FORMAT:
        raise NotReadable(
            f"the saved conversation has format {saved.format}; this router reads {FORMAT}"
        )
    found: list[TurnNode] = []
    total = 0
    for one, inherited in zip_longest(saved.turns, saved.inherited[: len(saved.turns)]):
        given, sampled = _array("I", one.given), _array("I", one.sampled)
        total += len(given) + len(sampled)
        found.append(
            TurnNode(
                *(("", saved.session), one.rid, found[-1] if found else None, given, sampled),
                *(_array("f", one.logprobs), one.spans, one.finish, one.semantics, one.digest),
                *(one.path, one.altered_at, total),
                inherited=bool(inherited),
                routing=None if one.routing is None else _routing(*one.routing),
            )
        )
    return found, saved.roots


def _routing(rows: bytes, begins: int, width: int, recomputed: int) -> Routing:
    if width < 1 or len(rows) % width or min(begins, recomputed) < 0:
        message = f"{len(rows)} bytes of experts in rows of {width} from token {begins} on"
        raise NotReadable(f"the saved conversation is torn: {message}")
    return Routing(rows, begins, width, recomputed)


def _raw(values: array[int] | array[float]) -> bytes:
    """Little-endian, whatever the machine."""
    if sys.byteorder == "little":
        return values.tobytes()
    swapped = values[:]
    swapped.byteswap()
    return swapped.tobytes()


def _array(code: str, data: bytes) -> array:  # type: ignore[type-arg]  # of both kinds
    made = array(code)
    try:
        made.frombytes(data)
    except ValueError as error:
        raise NotReadable(f"the saved conversation is torn: {error}") from error
    if sys.byteorder != "little":
        made.byteswap()
    return made
