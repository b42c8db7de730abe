"""Control socket of the plugin inside an engine: stage, commit, abort, attest, status.

Whoever brings weights to the node (weight-sync) speaks to the engine's scheduler process through a
Unix socket in the slot's run directory, never through the engine's HTTP server. One connection
carries any number of calls, one after the other; a frame is a 4-byte little-endian length and a
msgpack body. The same messages are answered by the plugins of the engines and by the fake engine
(``rose_engines.fake``). ``calls`` has the table of them.
Next step: ``rose_engines.weights.session`` carries the calls out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from rose_core.unreadable import UNREADABLE
from rose_engines.errors import CommitRefused, EngineUnavailable
from rose_engines.weights.calls import (
    LENGTH,
    Abort,
    Activate,
    Activated,
    Answer,
    Attest,
    Attested,
    Bind,
    Call,
    Commit,
    Committed,
    Draft,
    Drafted,
    Export,
    Exported,
    GetStatus,
    JoinPool,
    PoolJoined,
    Refused,
    Release,
    Released,
    Stage,
    Staged,
    Status,
    Unbind,
    answers,
    frame,
    read_call,
)

log = logging.getLogger(__name__)

A = TypeVar(
    "A", Staged, Committed, Attested, Exported, Released, Activated, Drafted, PoolJoined, Status
)


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
        # A folder that hands its group down says that this group may call as well.
        shared = temporary.parent.stat().st_mode & stat.S_ISGID
        temporary.chmod(0o660 if shared else 0o600)
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
                while (call := read_call(stream.read)) is not None:
                    stream.write(frame(self._handle(call)))
                    stream.flush()
            except (OSError, *UNREADABLE, ValueError) as error:
                log.warning("control connection ended: %s", error)


class ControlClient:
    """Calls the plugin of one engine; use ``async with await ControlClient.connect(path)``.

    Args:
        reader, writer: connected to it.
        run: whose adapter calls about weights mean, as long as they name none themselves; empty
            where the engine has one alone.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, run: str = ""
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._run = run
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(cls, path: Path, run: str = "") -> Self:
        """Connect to an engine's control socket.

        Raises:
            EngineUnavailable: nobody listens there (the engine is starting or gone).
        """
        try:
            return cls(*await asyncio.open_unix_connection(str(path)), run)
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
        return await self._ask(Stage(str(bundle), self._run), Staged)

    async def commit(self, version: str, timeout_seconds: float = 30.0) -> Committed:
        """Commit what is staged.

        Raises:
            CommitRefused: the version before goes on serving.
            EngineUnavailable: the engine died meanwhile; its weights died with it.
        """
        return await self._ask(Commit(version, timeout_seconds, self._run), Committed)

    async def abort(self) -> Status:
        """Forget what is staged.

        Raises:
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Abort(self._run), Status)

    async def attest(self) -> Attested:
        """Recompute the digest of the live weights.

        Raises:
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Attest(self._run), Attested)

    async def export(self, path: Path) -> Exported:
        """Write the live weights to a safetensors file.

        Raises:
            CommitRefused: the file cannot be written.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Export(str(path), self._run), Exported)

    async def release(self, timeout_seconds: float = 5.0) -> Released:
        """Let go of KV cache and weights.

        Raises:
            CommitRefused: nothing was released.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Release(timeout_seconds), Released)

    async def activate(self, timeout_seconds: float = 5.0) -> Activated:
        """Take KV cache and weights back.

        Raises:
            CommitRefused: ``Busy``: still dormant; ``Broken``: the engine must be restarted.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Activate(timeout_seconds), Activated)

    async def draft(self, texts: list[list[int]]) -> Drafted:
        """Draft from these texts, and from those of before no more.

        Raises:
            CommitRefused: the engine drafts nothing, or a token is none of its model's.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Draft(texts), Drafted)

    async def join_pool(self, secret: str) -> PoolJoined:
        """Have it join the platform's pool of keys, once; what became of that so far.

        Raises:
            CommitRefused: it was told of no pool when it was started.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(JoinPool(secret), PoolJoined)

    async def status(self) -> Status:
        """What is live and staged.

        Raises:
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(GetStatus(self._run), Status)

    async def bind(self, run: str, *, first: bool = False) -> Status:
        """Give a run one of the engine's slots for adapters.

        Args:
            run: its name.
            first: requests that name no run are its.

        Raises:
            CommitRefused: ``Full``: others have them all; ``Unsupported``: it has none.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Bind(run, first), Status)

    async def unbind(self, run: str, timeout_seconds: float = 5.0) -> Status:
        """End a run's requests and take its adapter away.

        Raises:
            CommitRefused: ``Busy``: its last request, or an iteration boundary, is still to come.
            EngineUnavailable: the engine died meanwhile.
        """
        return await self._ask(Unbind(run, timeout_seconds), Status)

    async def _ask(self, call: Call, kind: type[A]) -> A:
        async with self._lock:
            try:
                self._writer.write(frame(call))
                await self._writer.drain()
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                answer = answers.decode(await self._reader.readexactly(length))
            except (OSError, EOFError, *UNREADABLE) as error:
                raise EngineUnavailable(f"the engine hung up: {error}") from error
        if isinstance(answer, Refused):
            raise CommitRefused(answer.reason, answer.message)
        if not isinstance(answer, kind):
            raise EngineUnavailable(f"the engine answered {type(answer).__name__}")
        return answer
