"""Messages of the weight plane; ``service`` lists the methods."""

from __future__ import annotations

import msgspec

from rose_core.identity import WeightVersion


class VersionInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kept version, for people and for clients that choose.

    Attributes:
        version: what it is called.
        digest: digest of its whole state.
        base: version its delta starts from; None = full or bare.
        step: the trainer's label.
        changes, bytes: elements changed and size of all blocks.
    """

    version: WeightVersion
    digest: str
    base: WeightVersion | None = None
    step: int | None = None
    changes: int = 0
    bytes: int = 0


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
    """

    run: str
    have: WeightVersion | None = None
    digest: str = ""
    want: WeightVersion | None = None
    holder: str = ""


class PlanReply(msgspec.Struct, frozen=True):
    """The way there.

    Attributes:
        manifest: encoded ``rose_core.delta.Manifest``.
        merged: published manifests that went into it; 0 = the receiver is there already.
    """

    manifest: bytes
    merged: int


class FetchRequest(msgspec.Struct, frozen=True):
    """Send these blocks one after the other, as raw bytes in pieces of any size."""

    names: tuple[bytes, ...]


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
    """

    manifest: bytes
    expected: WeightVersion | None
