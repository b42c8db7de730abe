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


class AdapterVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The adapter of one run on an engine that holds several.

    Attributes:
        version, digest: attested in its slot; empty = no turns of this run.
        head: newest version of the run; empty = unknown.
    """

    run: str
    version: str = ""
    digest: str = ""
    head: str = ""


class EngineUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one engine; each message replaces the one before.

    Attributes:
        engine: unique name; for a borrowed engine the slot's name.
        lease: ``namespace/name`` of the lease whose router this must be.
        url: base URL of the data route; ``token`` is its bearer token.
        certificates: SHA-256, in hex, of those that the data route may answer with; empty = as
            ``url`` says by itself.
        gate_open: turns may be sent and tokens may be expected.
        cap: most turns in flight, the actuator of the budget loop.
        version, digest: attested on the live weights; empty = no version, no turns.
        head: newest version the weight plane has announced at the engine's side; empty = unknown.
            The router measures staleness against the newest head or version it has heard of.
        kv_tokens: size of the KV pool in tokens; 0 = unknown, then it is never taken for full.
        vocabulary: tokens that the engine's model knows; 0 = unknown. A larger id would end it.
        context_tokens: of prompt and answer together; 0 = unknown.
        tokenizer: digest of the files that turn the model's text into ids, at ``url`` + /tokenizer
            (``rose_core.wire.tokenizer_files``); empty = its node has none.
        device_class: of its GPU (``rose_core.devices.classes``); empty = unknown.
        reuses_kv: later turns may attend to keys that older weights computed (``kvPolicy: Reuse``).
        drafts: it verifies drafts, and takes tokens to draft from at ``url`` + /drafts.
        refuses: parameters of turns that it does not take (``rose_core.rollouts.requests.fields``);
        a turn
            that asks with one is never sent here.
        relayed: passed on by another replica of the router, not said by the owner itself.
        leaving: the engine will not come back; continue its turns elsewhere now.
        slowdown: how many times slower serving is while a borrowed engine computes, as its guard
            has measured; 0 = nobody has.
        adapters: of each run that it has one of, the lease's first run first; empty = it follows
            one run, and what is said above is of that.
        run: it is one adapter of an engine, as ``each_adapter`` tells them apart.
        named: it takes only turns that name its run.
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
    tokenizer: str = ""
    device_class: str = ""
    reuses_kv: bool = False
    drafts: bool = False
    refuses: tuple[str, ...] = ()
    relayed: bool = False
    leaving: bool = False
    certificates: tuple[str, ...] = ()
    adapters: tuple[AdapterVersion, ...] = ()
    run: str = ""
    named: bool = False
    slowdown: float = 0.0


def each_adapter(update: EngineUpdate) -> tuple[EngineUpdate, ...]:
    """An engine as one for each run that it has an adapter of: they share process, KV and cap.

    Only turns that say nothing of runs are the first one's, so no turn can meet another run's
    version by accident.
    """
    found = update.adapters
    return tuple(
        msgspec.structs.replace(
            update,
            engine=f"{update.engine}/{one.run}",
            version=one.version,
            digest=one.digest,
            head=one.head,
            kv_tokens=update.kv_tokens // len(found),
            adapters=(),
            run=one.run,
            named=number > 0,
        )
        for number, one in enumerate(found)
    )


class RouterNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The router's side of the stream, once a second: it lives.

    What it wants it tells the operator (``DemandNote``), also when no engine is attached.

    Attributes:
        adapters: it knows that an engine can be one adapter of several (``EngineUpdate.named``);
            others would take any turn to it, so it is passed on to no others.
    """

    adapters: bool = False


class DemandRequest(msgspec.Struct, frozen=True):
    """The operator asks the router of a lease to say what turns it has, for as long as it listens.

    Attributes:
        lease: ``namespace/name``; the router of another lease refuses.
    """

    lease: str


class DemandNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """Turns of one replica of a lease's router, at once after a change and every few seconds.

    Ages are seconds at the moment of sending.

    Attributes:
        waiting_tokens: prompt and output tokens of turns that wait for an engine.
        peak_turns: most live and waiting at once in the last minute.
        usual_turns: the same, in a usual step.
        dedicated_turns: turns that its open dedicated engines carry half full.
        phase: of the trainer, as its turns and publishes tell
        (``rose_core.rollouts.training.rhythm``). idle_seconds: since the last turn, None before the
        first. published_seconds: since a version came after the last turn; None when none has.
        expected_seconds: until the next turns are expected; None when nothing says. up_seconds:
        since the replica was started. instance: a name of its own that the replica's process made
        up; counts are of this process. accepted: trajectories that the trainer said it trained on.
        correct: correct answers among them. dedicated_tokens: output tokens that dedicated engines
        made. trained_tokens: output tokens of the trajectories trained on. reasoning_tokens: of
        these, before the answers, as the trainer said.
    """

    waiting_tokens: int = 0
    peak_turns: int = 0
    usual_turns: int = 0
    dedicated_turns: int = 0
    phase: str = "Unknown"
    idle_seconds: float | None = None
    published_seconds: float | None = None
    expected_seconds: float | None = None
    up_seconds: float = 0.0
    instance: str = ""
    accepted: int = 0
    correct: int = 0
    dedicated_tokens: int = 0
    trained_tokens: int = 0
    reasoning_tokens: int = 0
