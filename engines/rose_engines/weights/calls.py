"""Calls and answers of the control socket, and their frames.

A frame is a 4-byte little-endian length and a msgpack body; bodies are tagged with the class name.
Next step: ``control`` carries them, ``rose_engines.weights.session`` carries them out.

    call        answer      meaning
    Stage       Staged      decode and check a bundle beside the live weights; serving goes on
    Commit      Committed   swap it in at the next iteration boundary, attest, move the label
    Abort       Status      forget what is staged
    Attest      Attested    recompute the digest of all live weights now
    Export      Exported    write the live weights to a file, to compare them bit by bit
    Release     Released    let go of KV cache and weights now, also under a closed permit
    Activate    Activated   take them back at the next boundary under an open permit
    Draft       Drafted     draft from these tokens from now on, in place of those before
    JoinPool    PoolJoined  join the platform's pool of keys, once; how that goes
    GetStatus   Status      what is live, what is staged
    Bind        Status      give the run a slot for its adapter, which is nothing at first
    Unbind      Status      end the run's requests, zero its slot, and let others have it
    any         Refused     nothing changed; the version before goes on serving

Where an engine holds adapters of several runs, a call says which run it is for.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from rose_core.rollouts.engines.kv_store import PoolCounts
from rose_core.unreadable import UNREADABLE

LENGTH = struct.Struct("<I")
LARGEST = 1 << 20
"""Bytes of a body at most: messages name files, they carry none."""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Stage the bundle in this folder (``manifest.msgpack`` and ``blocks/``).

    Attributes:
        bundle: absolute path, on a file system that the engine sees.
    """

    bundle: str
    run: str = ""


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Commit what is staged, if it is this version.

    Attributes:
        timeout_seconds: give up when no iteration boundary under an open permit came until then.
    """

    version: str
    timeout_seconds: float = 30.0
    run: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget what is staged; harmless when nothing is."""

    run: str = ""


class Attest(msgspec.Struct, frozen=True, tag=True):
    """Recompute every tile digest on the live weights."""

    run: str = ""


class Export(msgspec.Struct, frozen=True, tag=True):
    """Write the live weights to this file as safetensors, to compare them bit by bit."""

    path: str
    run: str = ""


class Bind(msgspec.Struct, frozen=True, tag=True):
    """Give this run one of the engine's slots for adapters; harmless when it has one.

    Attributes:
        first: it is the run of requests that name none; the first slot is kept for it.
    """

    run: str
    first: bool = False


class Unbind(msgspec.Struct, frozen=True, tag=True):
    """Take the run's adapter away; harmless when there is none.

    Its requests are ended first: ``Busy`` until the last is gone.

    Attributes:
        timeout_seconds: give up when no iteration boundary under an open permit came until then.
    """

    run: str
    timeout_seconds: float = 5.0


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let go of KV cache and weights; every request in the engine is aborted.

    Attributes:
        timeout_seconds: give up when the engine's thread came by no resting point until then.
    """

    timeout_seconds: float = 5.0


class Activate(msgspec.Struct, frozen=True, tag=True):
    """Take KV cache and weights back; harmless when they were not released.

    Attributes:
        timeout_seconds: give up when no iteration boundary under an open permit came until then.
    """

    timeout_seconds: float = 5.0


class Draft(msgspec.Struct, frozen=True, tag=True):
    """Draft from these texts from now on, and from those of before no more.

    Attributes:
        texts: token ids; none = of what the engine has generated itself only.
    """

    texts: list[list[int]]


class JoinPool(msgspec.Struct, frozen=True, tag=True):
    """Know the lease's secret, by which its pages in the platform's pool are named and sealed.

    Sent again and again, for the answer; the first one counts.
    """

    secret: str

    def __repr__(self) -> str:
        """Without the secret: calls end up in logs."""
        return "JoinPool(...)"


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for the status."""

    run: str = ""


class Drafted(msgspec.Struct, frozen=True, tag=True):
    """It drafts from so many tokens."""

    tokens: int


class PoolJoined(msgspec.Struct, frozen=True, tag=True):
    """The engine knows its lease's secret.

    Attributes:
        counts: since it was told.
    """

    counts: PoolCounts


class Staged(msgspec.Struct, frozen=True, tag=True):
    """A bundle lies ready.

    Attributes:
        base, digest: digests the commit starts from and arrives at; base is empty for full state.
        changed_elements: elements that differ from the live weights.
        staged_bytes: memory the staged values and the undo log take.
    """

    version: str
    base: str
    digest: str
    changed_elements: int
    staged_bytes: int
    seconds: float


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The version is live and attested.

    Attributes:
        digest: recomputed on the live weights; equals the manifest's.
        pause_microseconds: time the engine did not compute: scatter, digests and label.
        fenced_requests: live requests that carry tokens of the version before.
        retracted_requests, recomputed_tokens: requests that lost their KV and prefill again.
    """

    version: str
    digest: str
    changed_elements: int
    pause_microseconds: int
    fenced_requests: int
    retracted_requests: int = 0
    recomputed_tokens: int = 0


class Attested(msgspec.Struct, frozen=True, tag=True):
    """Digest recomputed on all live weights."""

    version: str
    digest: str
    seconds: float


class Exported(msgspec.Struct, frozen=True, tag=True):
    """The live weights were written.

    Attributes:
        version: label of the weights in the file.
    """

    version: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """KV cache and weights are gone; the engine computes nothing until it is activated.

    Attributes:
        claimed_bytes: memory that should be free by now; whether it is, is for others to measure.
    """

    claimed_bytes: int
    seconds: float


class Activated(msgspec.Struct, frozen=True, tag=True):
    """The engine can compute again, with an empty cache and the weights it was started from.

    Attributes:
        version, digest: of the weights, recomputed on the live ones.
    """

    version: str
    digest: str
    seconds: float


class Status(msgspec.Struct, frozen=True, tag=True):
    """What the engine serves.

    Attributes:
        version: label that replies carry.
        digest: of the live weights, as last attested; empty while they are released.
        phase: ``Idle``, ``Staging``, ``Staged``, ``Committing``, ``Dormant`` or ``Broken``.
        staged: version that lies ready, or empty.
        commits: commits since the engine started.
        permit_open: None when the engine runs without a permit.
        iterations: iteration boundaries seen since the start.
        codecs: block codecs that bundles for this engine may use.
        resting: it waits at an iteration boundary and computes nothing.
        multiprocessors: how many of its GPU's it may use; None on CPU.
        device_bytes: memory it takes its GPU to have; None on CPU.
        attests: what digests are of: the ``Live`` weights, or the ``Copy`` of the checkpoint that
            the engine loaded (``rose_engines.sglang.loading``).
        run: whose adapter this is about; empty where the engine has one alone.
        runs: whose adapters it holds, in no order.
        adapter_bytes: memory that each slot for an adapter takes; 0 = it has none.
    """

    version: str
    digest: str
    phase: str
    staged: str = ""
    commits: int = 0
    pid: int = 0
    rank: int = 0
    permit_open: bool | None = None
    iterations: int = 0
    codecs: tuple[int, ...] = (1, 2, 3)
    resting: bool = False
    multiprocessors: int | None = None
    device_bytes: int | None = None
    attests: str = "Live"
    run: str = ""
    runs: tuple[str, ...] = ()
    adapter_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Nothing changed; ``reason`` is one of ``CommitRefused``'s."""

    reason: str
    message: str


Call = (
    Stage
    | Commit
    | Abort
    | Attest
    | Export
    | Release
    | Activate
    | Draft
    | JoinPool
    | GetStatus
    | Bind
    | Unbind
)
Answer = (
    Staged
    | Committed
    | Attested
    | Exported
    | Released
    | Activated
    | Drafted
    | PoolJoined
    | Status
    | Refused
)

encoder = msgspec.msgpack.Encoder()
calls: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Call | Answer) -> bytes:
    """A message as it goes over the socket."""
    body = encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def read_call(read: Callable[[int], bytes]) -> Call | None:
    """The next call from a blocking stream, None at its end.

    Raises:
        ValueError: the frame is too long or is no call.
    """
    body = _read_body(read)
    return None if body is None else calls.decode(body)


def ask(control: Path, call: Call, seconds: float) -> Answer:
    """One call on a connection of its own, from any thread.

    Raises:
        OSError: no answer within as many seconds, or none that is understood.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(str(control))
        connection.sendall(frame(call))
        with connection.makefile("rb") as stream:
            try:
                return answers.decode(_read_body(stream.read) or b"")
            except (ValueError, *UNREADABLE) as error:
                raise ConnectionError(f"no answer behind {control}: {error}") from error


def _read_body(read: Callable[[int], bytes]) -> bytes | None:
    """The next frame's body, None at the stream's end."""
    head = read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > LARGEST:
        raise ValueError(f"a control frame of {length} bytes; at most {LARGEST} are allowed")
    return read(length)
