"""Replies of a host about sessions, to callers near and far."""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.sandboxes.outside import RewoundEffects
from rose_core.sandboxes.policy import BoundaryAction


@dataclass(frozen=True)
class SessionStatus:
    """Where a session stands, as callers are answered.

    Attributes:
        session, turn, phase: where it stands.
        recoverable_to: the newest turn that survives this host.
        action, reason: what was done at the last boundary.
        unsaved: why the last boundary has no record; empty: it has one.
        seconds: that the last boundary's checkpoint took.
        bytes: that records needed so far.
    """

    session: str
    turn: int
    phase: str
    recoverable_to: int
    action: str = BoundaryAction.NONE
    reason: str = ""
    unsaved: str = ""
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Restored:
    """What a restore gave back.

    Attributes:
        told: as for every call.
        ids: token ids of the session up to the turn: what the router's session goes on from.
        weight_versions: that sampled them.
        crossing: effects outside that lie between.
        history: the router's own export of the session; empty: it told nothing.
    """

    told: SessionStatus
    ids: tuple[int, ...]
    weight_versions: tuple[str, ...]
    crossing: RewoundEffects
    history: bytes = b""


@dataclass(frozen=True)
class Forked:
    """What a fork made.

    Attributes:
        sessions: of the children.
        turn: that they go on from.
        ids, weight_versions, history: as in ``Restored``.
        here: those of them that are at the host which answers; others were made before, elsewhere.
    """

    sessions: tuple[str, ...]
    turn: int
    ids: tuple[int, ...]
    weight_versions: tuple[str, ...] = ()
    history: bytes = b""
    here: tuple[str, ...] = ()
