"""What a host knows of one sandbox.

Next step: ``saving`` saves it, ``host`` runs it.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

from rose_core.sandboxes import policy
from rose_core.sandboxes.outside import EgressEffect
from rose_core.sandboxes.policy import BoundaryAction, Decision
from rose_core.sandboxes.turns import SandboxClock
from rose_sandbox.egress import Egress
from rose_sandbox.runtimes.runtime import Handle, SandboxSpec
from rose_weights.store.records import Command, OwnedSession


@dataclass
class Box:
    """A session's sandbox on this host.

    Attributes:
        spec, handle: of the runtime.
        owned: the session's records.
        clock: where its trajectory stands.
        effects: that left it.
        commands: with a name, that have been run.
        ids, versions, history: of the turn that began last.
        decision, unsaved, seconds: of the last boundary.
        forced: the next boundary saves all: what the inspector compares with is no record.
        boundary: the task of the last boundary.
        egress: its proxy.
        lock: whoever changes it.
        waking: whoever brings it back.
        tunnels: connections into it.
        gone: set when it ends here.
    """

    spec: SandboxSpec
    handle: Handle
    owned: OwnedSession
    clock: SandboxClock = field(default_factory=SandboxClock)
    effects: tuple[EgressEffect, ...] = ()
    commands: dict[str, Command] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    versions: tuple[str, ...] = ()
    history: bytes = b""
    decision: Decision = field(default=Decision(BoundaryAction.NONE, policy.SaveReason.UNCHANGED))
    unsaved: str = ""
    seconds: float = 0.0
    forced: bool = False
    boundary: asyncio.Task[None] | None = None
    egress: Egress | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waking: asyncio.Lock = field(default_factory=asyncio.Lock)
    tunnels: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


def key_of(session: str) -> str:
    """A runtime's key for a session, whatever its name is made of."""
    return f"box-{hashlib.sha256(session.encode()).hexdigest()[:20]}"
