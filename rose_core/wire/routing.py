"""Whoever owns an engine -> router ``Attach``: gates, caps and attested versions.

The owner (node agent for a borrowed engine, engine host for a dedicated one) dials the router and
keeps one stream per engine open. A closed gate is sent at once. When the stream ends, the router
treats the gate as closed.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

UNSENT = "Unsent"
"""Type of a data route's 502 where the engine's process took no connection: it never saw the
request, so it did not end because of it."""


class EngineKind(StrEnum):
    """Whether an engine may be taken back at any moment."""

    BORROWED = "Borrowed"
    DEDICATED = "Dedicated"


class EngineUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one engine; each message replaces the one before.

    Attributes:
        engine: unique name; for a borrowed engine the slot's name.
        lease: ``namespace/name`` of the lease whose router this must be.
        url: base URL of the data route; ``token`` is its bearer token.
        gate_open: turns may be sent and tokens may be expected.
        cap: most turns in flight, the actuator of the budget loop.
        version, digest: attested on the live weights; empty = no version, no turns.
        head: newest version the weight plane has announced at the engine's side; empty = unknown.
            The router measures staleness against the newest head or version it has heard of.
        kv_tokens: size of the KV pool in tokens; 0 = unknown, then it is never taken for full.
        vocabulary: tokens that the engine's model knows; 0 = unknown. A larger id would end it.
        context_tokens: of prompt and answer together; 0 = unknown.
        reuses_kv: later turns may attend to keys that older weights computed (``kvPolicy: Reuse``).
        relayed: passed on by another replica of the router, not said by the owner itself.
        leaving: the engine will not come back; continue its turns elsewhere now.
    """

    engine: str
    kind: EngineKind
    lease: str
    url: str
    token: str = ""
    pool: str = ""
    gate_open: bool = False
    cap: int = 0
    version: str = ""
    digest: str = ""
    head: str = ""
    kv_tokens: int = 0
    vocabulary: int = 0
    context_tokens: int = 0
    reuses_kv: bool = False
    relayed: bool = False
    leaving: bool = False


class RouterNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The router's side of the stream, at most once a second.

    Attributes:
        live_turns: turns in flight on this engine.
        queued_turns: turns waiting for any engine of the lease.
    """

    live_turns: int = 0
    queued_turns: int = 0
