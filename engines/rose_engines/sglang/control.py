"""Control socket of the plugin inside an engine: stage, commit, abort, attest, status.

Whoever brings weights to the node (weight-sync) speaks to the engine's scheduler process through a
Unix socket in the slot's run directory, never through the engine's HTTP server. One connection
carries any number of calls, one after the other; a frame is a 4-byte little-endian length and a
msgpack body. The same messages are answered by the real plugin (``plugin``) and by the fake engine
(``rose_engines.fake``). Next step: ``rose_engines.session`` carries the calls out.

    call        answer      meaning
    Stage       Staged      decode and check a bundle beside the live weights; serving goes on
    Commit      Committed   swap it in at the next iteration boundary, attest, move the label
    Abort       Status      forget what is staged
    Attest      Attested    recompute the digest of all live weights now
    Export      Exported    write the live weights to a file, to compare them bit by bit
    GetStatus   Status      what is live, what is staged
    any         Refused     nothing changed; the version before goes on serving
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from rose_engines.errors import CommitRefused, EngineUnavailable

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_LARGEST = 1 << 20


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Stage the bundle in this folder (``manifest.msgpack`` and ``blocks/``).

    Attributes:
        bundle: absolute path, on a file system that the engine sees.
    """

    bundle: str


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Commit what is staged, if it is this version.

    Attributes:
        timeout_seconds: give up when no iteration boundary under an open permit came until then.
    """

    version: str
    timeout_seconds: float = 30.0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget what is staged; harmless when nothing is."""


class Attest(msgspec.Struct, frozen=True, tag=True):
    """Recompute every tile digest on the live weights."""


class Export(msgspec.Struct, frozen=True, tag=True):
    """Write the live weights to this file as safetensors, to compare them bit by bit."""

    path: str


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for the status."""


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
    """

    version: str
    digest: str
    changed_elements: int
    pause_microseconds: int
    fenced_requests: int


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


class Status(msgspec.Struct, frozen=True, tag=True):
    """What the engine serves.

    Attributes:
        version: label that replies carry.
        digest: of the live weights, as last attested.
        phase: ``Idle``, ``Staging``, ``Staged``, ``Committing`` or ``Broken``.
        staged: version that lies ready, or empty.
        commits: commits since the engine started.
        permit_open: None when the engine runs without a permit.
        iterations: iteration boundaries seen since the start.
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


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Nothing changed; ``reason`` is a word of ``CommitRefused``."""

    reason: str
    message: str


Call = Stage | Commit | Abort | Attest | Export | GetStatus
Answer = Staged | Committed | Attested | Exported | Status | Refused
A = TypeVar("A", Staged, Committed, Attested, Exported, Status)

_encoder = msgspec.msgpack.Encoder()
_calls: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def _frame(message: Call | Answer) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class ControlServer:
    """Answers calls on a Unix socket, from threads of its own.

    Args:
        path: the socket; a leftover of a dead engine is replaced.
        handle: called in a connection's thread; it serialises what must not overlap.
    """

    def __init__(self, path: Path, handle: Callable[[Call], Answer]) -> None:
        self._path = path
        self._handle = handle
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the folder is missing or the path is too long for a socket.
        """
        # Bound under another name and renamed: a client sees either nothing or a listener.
        temporary = self._path.with_name(f".{self._path.name[:8]}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._socket.bind(str(temporary))
        temporary.chmod(0o600)
        self._socket.listen(8)
        temporary.replace(self._path)
        threading.Thread(target=self._accept, name="rose-control", daemon=True).start()

    def close(self) -> None:
        """Stop listening; calls under way end by themselves."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            try:
                while (call := _read_call(stream.read)) is not None:
                    stream.write(_frame(self._handle(call)))
                    stream.flush()
            except (OSError, msgspec.MsgspecError, ValueError) as error:
                log.warning("control connection ended: %s", error)


def _read_call(read: Callable[[int], bytes]) -> Call | None:
    """The next call, None at the end of the stream."""
    head = read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _LARGEST:
        raise ValueError(f"a control frame of {length} bytes; at most {_LARGEST} are allowed")
    return _calls.decode(read(length))


class ControlClient:
    """Calls the plugin of one engine; use ``async with await ControlClient.connect(path)``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(cls, path: Path) -> Self:
        """Connect to an engine's control socket.

        Raises:
            EngineUnavailable: nobody listens there (the engine is starting or gone).
        """
        try:
            return cls(*await asyncio.open_unix_connection(str(path)))
        except OSError as error:
            raise EngineUnavailable(f"no engine behind {path}: {error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def stage(self, bundle: Path) -> Staged:
        """Stage a bundle.

        Raises:
            CommitRefused: the bundle does not fit; nothing is staged.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Stage(str(bundle)), Staged)

    async def commit(self, version: str, timeout_seconds: float = 30.0) -> Committed:
        """Commit what is staged.

        Raises:
            CommitRefused: the version before goes on serving.
            EngineUnavailable: the engine died meanwhile; its weights died with it.
        """
        return await self._ask(Commit(version, timeout_seconds), Committed)

    async def abort(self) -> Status:
        """Forget what is staged.

        Raises:
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Abort(), Status)

    async def attest(self) -> Attested:
        """Recompute the digest of the live weights.

        Raises:
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Attest(), Attested)

    async def export(self, path: Path) -> Exported:
        """Write the live weights to a safetensors file.

        Raises:
            CommitRefused: the file cannot be written.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Export(str(path)), Exported)

    async def status(self) -> Status:
        """What is live and staged.

        Raises:
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(GetStatus(), Status)

    async def _ask(self, call: Call, kind: type[A]) -> A:
        async with self._lock:
            try:
                self._writer.write(_frame(call))
                await self._writer.drain()
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                answer = _answers.decode(await self._reader.readexactly(length))
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                raise EngineUnavailable(f"the engine hung up: {error}") from error
        if isinstance(answer, Refused):
            raise CommitRefused(answer.reason, answer.message)
        if not isinstance(answer, kind):
            raise EngineUnavailable(f"the engine answered {type(answer).__name__}")
        return answer
