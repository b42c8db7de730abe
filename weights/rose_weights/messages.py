"""Messages of the weight plane; ``service`` lists the methods."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rose_core.delta import Manifest
from rose_core.identity import WeightVersion


class VersionInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kept version, for people and for clients that choose.

    Attributes:
        version: what it is called.
        digest: digest of its whole state.
        base: version its delta starts from; None = full or bare.
        step: the trainer's label.
        changes, bytes: elements changed and size of all blocks.
        encode_seconds: what comparing and encoding took its publisher; 0 = it did not say.
    """

    version: WeightVersion
    digest: str
    base: WeightVersion | None = None
    step: int | None = None
    changes: int = 0
    bytes: int = 0
    encode_seconds: float = 0.0


class DescribeRequest(msgspec.Struct, frozen=True):
    """Ask what a run has; an empty run asks for the names of all runs."""

    run: str = ""


class Description(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a run has.

    Attributes:
        head: the last published version; None before the first publish.
        versions: kept versions, oldest first.
        fence: incarnation that may publish; ``publisher`` is who opened it.
    """

    runs: tuple[str, ...] = ()
    run: str = ""
    head: VersionInfo | None = None
    versions: tuple[VersionInfo, ...] = ()
    fence: int = 0
    publisher: str = ""


class WatchRequest(msgspec.Struct, frozen=True):
    """Follow the head of a run, which need not exist yet."""

    run: str


class PlanRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """From what I hold to what I want.

    Attributes:
        have: the version the receiver's label names, None when it has none.
        digest: digest of the weights it holds, recomputed by it; empty = in full, please.
        want: None = the head.
        holder: name of the receiver; ``have`` and the target are kept for it for a while.
        codecs: block codecs it can read; who does not say reads the self-contained ones.
    """

    run: str
    have: WeightVersion | None = None
    digest: str = ""
    want: WeightVersion | None = None
    holder: str = ""
    codecs: tuple[int, ...] = (1, 2, 3)


class PlanReply(msgspec.Struct, frozen=True):
    """The way there.

    Attributes:
        manifest: encoded ``rose_core.delta.Manifest``.
        merged: published manifests that went into it; 0 = the receiver is there already.
    """

    manifest: bytes
    merged: int


class FetchPlan(NamedTuple):
    """A plan as its receiver uses it.

    Attributes:
        manifest: what leads from what the receiver has to what it wants.
        merged: as in ``PlanReply``.
    """

    manifest: Manifest
    merged: int


class FetchRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Send these blocks one after the other, as raw bytes in pieces of any size.

    Attributes:
        check: one of them came damaged: read every byte again before it is sent.
    """

    names: tuple[bytes, ...]
    check: bool = False


class OpenRequest(msgspec.Struct, frozen=True):
    """Take a run over as its only publisher.

    Attributes:
        publisher: who, for people.
    """

    run: str
    publisher: str


class MissingRequest(msgspec.Struct, frozen=True):
    """Which of these blocks does the store not have?"""

    names: tuple[bytes, ...]


class MissingReply(msgspec.Struct, frozen=True):
    """Names of the blocks to send."""

    names: tuple[bytes, ...]


class PutReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """One block is staged under this name.

    Attributes:
        error: why it is not, as ``errors.as_text`` writes it. An error travels as a message
            because gRPC loses the reason of a stream that is ended while the peer still writes.
    """

    name: bytes = b""
    error: str = ""


class CommitRequest(msgspec.Struct, frozen=True):
    """Make this manifest the head.

    Attributes:
        expected: the head the publisher believes in.
        on_base: the same version with blocks coded on their base, for receivers that read them.
        encode_seconds: what comparing and encoding took; 0 = unknown.
    """

    manifest: bytes
    expected: WeightVersion | None
    on_base: bytes = b""
    encode_seconds: float = 0.0


class PartRequest(msgspec.Struct, frozen=True):
    """One rank's part of a version; answered when the parts of all ranks made it the head.

    Attributes:
        part: encoded ``rose_core.delta.parts.RankPart``; its blocks are staged already.
        expected: the head the publisher believes in.
        seconds: answer by then at the latest.
        encode_seconds: what comparing and encoding took this rank; 0 = unknown.
        continues: the part has digests alone: is the whole state a version that is kept? Then it
            is the head as an empty delta, else nothing has changed and ``in_full`` says so.
    """

    part: bytes
    expected: WeightVersion | None
    seconds: float = 10.0
    encode_seconds: float = 0.0
    continues: bool = False


class PartReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of the version.

    Attributes:
        head: the version, once it is the head; None = other parts are missing still, ask again.
        in_full: no kept version is this state; send it with its blocks.
    """

    head: VersionInfo | None = None
    in_full: bool = False


class AttestedRequest(msgspec.Struct, frozen=True):
    """A receiver says what it serves, recomputed on its live weights.

    Attributes:
        answer: log-probs of the fixed prompt (``rose_core.delta.probe``); empty = not asked.
        trainer: the answer is the trainer's own, which all others are compared with.
    """

    holder: str
    version: WeightVersion
    digest: str
    answer: tuple[float, ...] = ()
    trainer: bool = False


class AttestedReply(msgspec.Struct, frozen=True):
    """Noted, if ``known``: the version is kept and the digest is its digest.

    Attributes:
        trainer, others: answers to the fixed prompt at this version, of others than the caller.
    """

    known: bool
    trainer: tuple[float, ...] = ()
    others: tuple[tuple[float, ...], ...] = ()


class AwaitRequest(msgspec.Struct, frozen=True):
    """Answer when enough receivers serve a version or a later one.

    Attributes:
        quorum: an integer = that many; a fraction up to 1 = that share of those that report.
        seconds: answer by then at the latest.
    """

    version: WeightVersion
    quorum: int | float
    seconds: float


class AwaitReply(msgspec.Struct, frozen=True):
    """Who serves what.

    Attributes:
        met: the quorum was reached.
        serving: receivers that serve the version or a later one.
        behind: those that report and serve an older one.
    """

    met: bool
    serving: tuple[str, ...]
    behind: tuple[str, ...]


class SessionState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose a sandbox's session is, and which of its turns have a record.

    Attributes:
        fence: of the host that may publish; 0: nobody has begun it.
        owner: that host's name.
        turns: (turn, name of its record), in order.
    """

    fence: int = 0
    owner: str = ""
    turns: tuple[tuple[int, str], ...] = ()


class OwnRequest(msgspec.Struct, frozen=True):
    """Take a session of a run over, or begin it.

    Attributes:
        over: the fence that it must still have; None: whichever.
    """

    run: str
    session: str
    owner: str
    over: int | None = None


class SessionRequest(msgspec.Struct, frozen=True):
    """Ask how a session of a run stands."""

    run: str
    session: str


class RecordRequest(msgspec.Struct, frozen=True):
    """Ask for a record of a session by its name."""

    run: str
    session: str
    name: str


class RecordBlockRequest(msgspec.Struct, frozen=True):
    """Ask for a block of a run's records."""

    run: str
    block: bytes


class RecordPutRequest(msgspec.Struct, frozen=True):
    """Stage a block for the next record of a session."""

    run: str
    session: str
    fence: int
    data: bytes


class RecordCommitRequest(msgspec.Struct, frozen=True):
    """Make a record a session's newest."""

    run: str
    session: str
    fence: int
    record: bytes


class ForgetRequest(msgspec.Struct, frozen=True):
    """A session is over."""

    run: str
    session: str
    fence: int
