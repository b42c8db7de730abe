"""Calls between two processes of one node, over a Unix socket and without gRPC.

gRPC wakes several threads for each call, also for those of the guard to the engine host, of which
there are some every second for as long as a node lives. Here a call is one frame each way in the
event loop that asks. One message each way only; who may ask is the socket's mode, so there is no
token and no TLS. ``rpc`` chooses it by the scheme ``local:/path``; its errors are the same.

| frame | holds |
|---|---|
| request | number, path of the method, message |
| the asker has given up | number, ``""``, nothing |
| answer | number, ``CallOutcome``, message or reason |

They are framed as ``frames`` says. A connection that ends ends its calls, on both sides.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from pathlib import Path

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_wire import frames
from rose_wire.errors import Refused, Unavailable, WireError

SCHEME = "local:"
Handler = Callable[[bytes], Awaitable[bytes]]

_log = logging.getLogger(__name__)
_LONGEST = 64 * 1024 * 1024


class CallOutcome(IntEnum):
    """How a call ended."""

    ANSWERED = 0
    REFUSED = 1
    UNAVAILABLE = 2


class _Request(msgspec.Struct, frozen=True, array_like=True):
    number: int
    path: str
    body: bytes


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    number: int
    outcome: CallOutcome
    body: bytes


# Turns of the event loop from ``accept`` to the first step of who answers: the task that asyncio
# makes of it, ``connection_made``, and what that begins; one more to be there before them.
_ACCEPTING_TURNS = 4
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(_Request)
_answers = msgspec.msgpack.Decoder(_Answer)


class _Frames(asyncio.Protocol):
    """Frames out of bytes as they come, and into them."""

    def __init__(self) -> None:
        self._splitter = frames.Splitter(_LONGEST, "a local call's socket")
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # for mypy: a stream
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.feed(data):
                self.take(frame)
        except (ValueError, *UNREADABLE) as error:
            _log.warning("local call: %s", error)
            self.abort()

    def take(self, frame: bytes) -> None:
        """One frame."""
        raise NotImplementedError

    def send(self, message: object) -> None:
        """Write one frame; to a connection that has ended, nothing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.pack(_encoder.encode(message)))

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()


class _Asking(_Frames):
    """The asker's end of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self.ended = False

    async def ask(self, path: str, body: bytes) -> bytes:
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self.send(_Request(number, path, body))
        try:
            return await answer
        except asyncio.CancelledError:
            self.send(_Request(number, "", b""))
            raise
        finally:
            self._waiting.pop(number, None)

    def take(self, frame: bytes) -> None:
        answer = _answers.decode(frame)
        waiting = self._waiting.get(answer.number)
        if waiting is None or waiting.done():
            return  # given up meanwhile
        if answer.outcome is CallOutcome.ANSWERED:
            waiting.set_result(answer.body)
        else:
            kind = Refused if answer.outcome is CallOutcome.REFUSED else Unavailable
            waiting.set_exception(kind(answer.body.decode(errors="replace")))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unavailable(f"the connection ended: {error or 'closed'}"))


class Channel:
    """Asks whoever listens at a Unix socket; connects by itself, again after a loss.

    Args:
        path: the socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session: _Asking | None = None
        self._connecting = asyncio.Lock()

    async def ask(self, path: str, body: bytes, seconds: float) -> bytes:
        """Send one message, await one.

        Raises:
            Unavailable: nobody listens, or no answer came inside so many seconds.
            Refused: the other said no.
        """
        try:
            async with asyncio.timeout(seconds):
                session = await self._connected()
                return await session.ask(path, body)
        except TimeoutError as error:
            raise Unavailable(f"{path}: no answer in {seconds:g} s") from error
        except OSError as error:
            raise Unavailable(f"{path}: {self._path}: {error}") from error
        except WireError as error:
            raise type(error)(f"{path}: {error}") from error

    async def _connected(self) -> _Asking:
        async with self._connecting:
            if self._session is None or self._session.ended:
                loop = asyncio.get_running_loop()
                _, self._session = await loop.create_unix_connection(_Asking, str(self._path))
            return self._session

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection and the calls on it."""
        if self._session is not None:
            self._session.abort()
            self._session = None


class _Answering(_Frames):
    """The answerer's end of a connection."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__()
        self._server = server
        self._calls: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.sessions.add(self)
        if self._server.stopped:  # it was accepted before
            self.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        self._server.sessions.discard(self)
        for call in self._calls.values():
            call.cancel()

    @property
    def calls(self) -> list[asyncio.Task[None]]:
        """Calls that are not answered yet."""
        return list(self._calls.values())

    def take(self, frame: bytes) -> None:
        request = _requests.decode(frame)
        known = self._calls.get(request.number)
        if not request.path:
            if known is not None:
                known.cancel()
            return
        if known is not None:
            raise ValueError(f"call {request.number} is under way already")
        call = asyncio.get_running_loop().create_task(self._call(request))
        self._calls[request.number] = call
        call.add_done_callback(lambda _task: self._calls.pop(request.number, None))

    async def _call(self, request: _Request) -> None:
        self.send(_Answer(request.number, *await self._server.answer(request.path, request.body)))


class LocalServer:
    """Answers on a Unix socket.

    Args:
        handlers: by the path of their method.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._server: asyncio.Server | None = None
        self.sessions: set[_Answering] = set()
        self.stopped = False

    async def start(self, path: Path) -> None:
        """Listen; only our user may connect, from the first moment on.

        Raises:
            Unavailable: the path cannot be bound.
        """
        try:
            listener = _bound(path)
        except OSError as error:
            raise Unavailable(f"cannot listen on {path}: {error}") from error
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Answering(self), sock=listener)

    async def answer(self, path: str, body: bytes) -> tuple[CallOutcome, bytes]:
        """Call the handler; what it raises becomes the answer."""
        handler = self._handlers.get(path)
        if handler is None:
            return CallOutcome.REFUSED, b"no such method"
        try:
            return CallOutcome.ANSWERED, await handler(body)
        except WireError as error:
            kind = (
                CallOutcome.UNAVAILABLE if isinstance(error, Unavailable) else CallOutcome.REFUSED
            )
            return kind, str(error).encode()
        except Exception as error:  # noqa: BLE001  # as in gRPC: the asker hears of it
            _log.exception("%s failed", path)
            return CallOutcome.REFUSED, f"{type(error).__name__}: {error}".encode()

    async def stop(self, grace_seconds: float) -> None:
        """Listen no more; calls under way have so long, then everything is closed."""
        self.stopped = True
        if self._server is not None:
            await stop_accepting(self._server)
        calls = [call for session in self.sessions for call in session.calls]
        if calls:
            await asyncio.wait(calls, timeout=grace_seconds)
        for session in list(self.sessions):
            session.abort()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def stop_accepting(server: asyncio.Server) -> None:
    """Close a server; what it has accepted by then is a connection that its owner knows.

    asyncio loses one, and leaves it open, whose server is closed between ``accept`` and the task
    that makes a connection of it.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(_ACCEPTING_TURNS):
        await asyncio.sleep(0)
    server.close()


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener
