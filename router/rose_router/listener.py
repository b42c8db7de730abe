"""The front door: sockets of callers, with limits that no caller can talk the router out of.

| a caller that | meets |
|---|---|
| opens more connections than all together may | closes the oldest that has sent no whole request |
| does so while each of them has | closes the one that has been idle longest since its answer |
| does so while all are being answered | 503 with ``Retry-After``, closed |
| connects and sends nothing in time | the connection is closed |
| sends no whole request head in time | 408, closed |
| sends its body slower than ``body_seconds`` allow | 408 |
| sends either in crumbs | is heard less often (``slow_senders``) |
| does not read its answer, whichever route's, for ``write_seconds`` | is taken for gone |
| from then on reads less than 64 KiB a second of what it is behind | the same |
| has left something unread for as long since its answer | makes room for another |
| sends a head or a body above the limits | 431 or 400, 413 |

TLS is the listener's: a folder with ``tls.crt`` and ``tls.key``, looked at again for every new
connection, so a renewed certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from rose_core.rollouts.capacity.router_size import MOST_CONNECTIONS
from rose_router import metrics
from rose_router.begun import BegunTask
from rose_router.slow_senders import IncomingBody, Sender, SlowSenders, last_seconds
from rose_router.tls_layer import TlsLayer
from rose_wire import tls
from rose_wire.tls import CERTIFICATE, KEY

HEAD_BYTES = 16 * 1024
_LOOK_SECONDS = 1.0
_BACKLOG = 4096
"""Callers that may wait to be accepted: a kernel's usual limit. Beyond it they dial again after a
second."""
_AT_ONCE = 16
"""Callers looked at in a step of the loop, 25 us each: a turn takes ten steps or more."""
_SPEAK_AT_ONCE = 4
"""Callers of these that begin to speak, who cost the loop 100 us each in its next steps."""
_REST_SECONDS = 0.1
"""Without descriptors, until callers are accepted again."""
_HANDSHAKE_SECONDS = 10.0
"""Of TLS."""
_IDLE_SECONDS = 1.0
"""Since its answer, after which a connection may be closed for another: the answer is on its way
when the handler has ended."""
_HEAD_SECONDS = 1.0
"""At the end, for who has dialled: his request is on its way."""
_LOOK_AGAIN_SECONDS = 0.02
LEAST_RATE = 1 << 16
"""Bytes of a second that a caller reads at least, once its ``write_seconds`` are over: transports
hold as much before they ask whoever writes to wait, so a stream's caller must read no less."""
_FAREWELL_SECONDS = 1.0
"""For a last word: who takes neither it nor the end of TLS would stay, uncounted, for 30 s."""


def _closing_response(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Type: application/json\r\n" % status
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


_FULL = _closing_response(
    b"503 Service Unavailable\r\nRetry-After: 1",
    b'{"type":"Connections","code":503,"message":"too many connections"}',
)
_LATE = _closing_response(
    b"408 Request Timeout",
    b'{"type":"SlowCaller","code":408,"message":"the request head did not come in time"}',
)


@runtime_checkable
class AnswersWhole(Protocol):
    """What tells whole requests from what is still coming."""

    @property
    def answers_whole(self) -> bool:
        """Whether what arrived last was one whole request, which is being answered."""


MakeProtocol = Callable[[], asyncio.Protocol]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What callers may take.

    Attributes:
        connections: open at one time.
        head_seconds: until the first whole request head.
        body_seconds: until a body is whole, without the time for which its sender was held back.
        write_seconds: until a caller that is behind has read enough to take the next piece of its
            answer; a second more for every ``LEAST_RATE`` bytes that it has not read by then.
        patience_seconds: for which a head or body is heard at every arrival, where nobody knows how
            much of it is missing.
    """

    connections: int = MOST_CONNECTIONS
    head_seconds: float = 15.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    patience_seconds: float = 1.0


@dataclass(eq=False)
class LimitedConnection(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's protocol, and counts.

    | while it is | it is held by |
    |---|---|
    | silent | the kernel's epoll of ``SilentConnections``; a few of them by the next two |
    | dialled: has sent a byte, and shakes hands where there is TLS | a task |
    | speaking | its transport |
    | over | nobody |

    Attributes:
        make: aiohttp's protocol, which a connection without a word is not worth.
        opened: when it was accepted, on the clock of all doors.
        named: what the caller's certificate must name; empty = anything.
        hang_up: ends it while it has no transport.
        inner: what speaks HTTP.
        whole: the same, where it tells whole requests from others.
        refused: there was no room for it, which it is told.
        sender: what is coming from it, once it has sent a byte.
        behind: ends it; while what it was sent lies unread and whoever writes has to wait.
    """

    make: MakeProtocol
    doors: ConnectionLimiter
    opened: float
    named: str = ""
    hang_up: Callable[[], object] | None = None
    transport: asyncio.Transport | None = None
    inner: asyncio.Protocol | None = None
    whole: AnswersWhole | None = None
    refused: bool = False
    sender: Sender | None = None
    behind: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It speaks."""
        # By its duties: uvloop's transports do not inherit from asyncio's.
        self.transport, self.hang_up = cast("asyncio.Transport", transport), None
        if self.named and self.named not in _names(self.transport):
            self.transport.abort()
            return
        if self.refused:
            self._end(self.transport, _FULL)
            return
        self.doors.note_transport(self)
        self.inner = inner = self.make()
        self.whole = inner if isinstance(inner, AnswersWhole) else None
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of the caller."""
        if self.inner is not None:
            self.inner.data_received(data)
            whole, sender = self.whole, self.sender
            if whole is not None and whole.answers_whole and sender and sender.begun is None:
                return  # nothing of it is missing
            self.doors.note_arrival(self)

    def eof_received(self) -> bool | None:
        """The caller sends no more."""
        return None if self.inner is None else self.inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller is gone."""
        self._note_read()
        self.doors.leave(self)
        if self.inner is not None:
            self.inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """The caller reads too slowly."""
        if self.behind is None:
            loop = asyncio.get_running_loop()
            self.behind = loop.call_later(self.doors.write_seconds, self._look_unread)
        if self.inner is not None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._note_read()
        if self.inner is not None:
            self.inner.resume_writing()

    def _note_read(self) -> None:
        if self.behind is not None:
            self.behind.cancel()
            self.behind = None

    def _look_unread(self) -> None:
        if self.transport is not None:
            more = self.transport.get_write_buffer_size() / LEAST_RATE
            self.behind = asyncio.get_running_loop().call_later(more, self._end_unread)

    def _end_unread(self) -> None:
        """Who waits for it to read is told that it has gone."""
        metrics.UNREAD.inc()
        self.abort()

    def end_late(self) -> None:
        """End it, since no head came; it is told so if it has begun one."""
        if self.transport is None or self.sender is None or self.sender.begun is None:
            self.abort()
            return
        metrics.REFUSED.labels("SlowCaller").inc()
        self._end(self.transport, _LATE)

    def _end(self, transport: asyncio.Transport, response: bytes) -> None:
        self.doors.leave(self)
        transport.write(response)
        transport.close()
        asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, transport.abort)

    def abort(self) -> None:
        """End it, wherever it is."""
        self.doors.leave(self)
        if self.transport is not None:
            self.transport.abort()
        elif self.hang_up is not None:
            self.hang_up()


def _names(transport: asyncio.Transport) -> set[str]:
    """The hosts and addresses that the other side's certificate names."""
    certificate = transport.get_extra_info("peercert") or {}
    return {str(name) for _, name in certificate.get("subjectAltName", ())}


class ConnectionLimiter:
    """All connections of callers.

    Args:
        limits: see there.

    Attributes:
        clock: seconds in which the router had time to listen: when it is behind, what callers sent
            lies unread, and their silence is its own.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self.clock = 0.0
        self._open: set[LimitedConnection] = set()
        self._headless: dict[LimitedConnection, None] = {}  # no whole request yet; the oldest first
        # Of those that speak.
        self._over: dict[asyncio.BaseTransport | None, LimitedConnection] = {}
        self._answered: dict[LimitedConnection, float] = {}  # since when; the oldest first
        self._slow = SlowSenders(limits.patience_seconds)
        metrics.CONNECTIONS.set_function(self.__len__)
        metrics.SLOW_SENDERS.set_function(self._slow.__len__)

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, door: LimitedConnection) -> bool:
        """Whether there is room for one more; who asks nothing gives way."""
        if len(self._open) >= self._limits.connections:
            oldest = next(iter(self._headless), None) or self._longest_idle()
            if oldest is None:
                metrics.REFUSED.labels("Connections").inc()
                return False
            oldest.abort()
        self._open.add(door)
        self._headless[door] = None
        return True

    @property
    def write_seconds(self) -> float:
        """See ``ConnectionLimits``."""
        return self._limits.write_seconds

    def _longest_idle(self) -> LimitedConnection | None:
        """A connection is kept for an hour after an answer, and anybody may ask for one."""
        due = self.clock - _IDLE_SECONDS
        answered = itertools.takewhile(lambda door: self._answered[door] < due, self._answered)
        for door in itertools.islice(answered, _AT_ONCE):
            if door.transport is None:
                continue
            late = self._answered[door] < self.clock - self._limits.write_seconds
            if late or not door.transport.get_write_buffer_size():
                return door
        return None

    @property
    def headless(self) -> int:
        """Connections over which no whole request head has come yet."""
        return len(self._headless)

    def note_transport(self, door: LimitedConnection) -> None:
        """It has one."""
        if door.transport is not None and door in self._open:
            self._over[door.transport] = door

    def note_arrival(self, door: LimitedConnection) -> None:
        """Bytes of it were passed on to aiohttp."""
        sender, transport = door.sender, door.transport
        if sender is None or transport is None or door not in self._open:
            return
        if sender.begun is not None:
            self._slow.note_bytes(sender, reading=transport.is_reading())
        elif door in self._headless:
            self._slow.begin(sender, self._limits.head_seconds + door.opened - self.clock)
        else:
            self._slow.begin(sender, math.inf)  # aiohttp's keep-alive watches it

    def note_whole(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request has come over it."""
        door = self._over.get(transport)
        if door is None or door.sender is None:
            return
        self._headless.pop(door, None)
        self._answered.pop(door, None)
        if door.sender.begun is not None:
            self._slow.rest(door.sender)

    def note_head(
        self,
        transport: asyncio.BaseTransport | None,
        body: IncomingBody,
        length: int | None,
        *,
        chunked: bool,
    ) -> None:
        """A whole request head has come over it.

        Args:
            transport: over which.
            body: that follows.
            length: of the body; ``None``: unknown.
            chunked: it ends with a line.
        """
        door = self._over.get(transport)
        if door is None or door.sender is None or door.transport is None:
            return
        self._headless.pop(door, None)
        self._answered.pop(door, None)
        if body.is_eof():
            self._slow.rest(door.sender)
        else:
            limit = self._limits.body_seconds
            self._slow.begin(door.sender, limit, body, length, ends_with_line=chunked)
            self._slow.note_bytes(door.sender, reading=door.transport.is_reading())

    def note_answered(self, transport: asyncio.BaseTransport | None) -> None:
        """The request that came over it has its answer."""
        door = self._over.get(transport)
        if door is not None:
            self._answered[door] = self.clock

    def leave(self, door: LimitedConnection) -> None:
        """It has ended."""
        self._open.discard(door)
        self._headless.pop(door, None)
        self._answered.pop(door, None)
        if door.transport is not None:
            self._over.pop(door.transport, None)
        if door.sender is not None:
            self._slow.leave(door.sender)

    async def await_heads(self) -> None:
        """Give those that sent no whole request head the time for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEAD_SECONDS):
                while self._headless:  # noqa: ASYNC110  # once, at the end
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    def close_silent(self) -> None:
        """Close those that sent no whole request head: aiohttp knows only of the others."""
        for door in list(self._headless):
            door.abort()

    def _close_late(self) -> int:
        due = self.clock - self._limits.head_seconds
        late = itertools.takewhile(lambda door: door.opened < due, self._headless)
        closed = list(itertools.islice(late, _AT_ONCE))
        for door in closed:
            door.end_late()
        return len(closed)

    async def watch(self) -> None:
        """Close those whose first head does not come in time, until cancelled."""
        pause = step = last_seconds(self._limits.head_seconds)
        while True:
            await asyncio.sleep(pause)
            self.clock += pause
            pause = 0.0 if self._close_late() == _AT_ONCE else step


class SilentConnections:
    """Takes callers, and holds each until its first byte.

    An event loop takes all callers that wait in one go, at 30 us each, and looks at all that hung
    up likewise: ten thousand without a word kept everybody waiting. Here they cost it one
    descriptor, an epoll of their own (epoll(7) nests), and it looks at ``_AT_ONCE`` a step.

    While no more than ``_SPEAK_AT_ONCE`` are without a head, a new one is made ready before its
    first byte: its caller is about to send a request, and making it ready takes as long as reading
    that. With TLS it waits for the byte, since from then on a handshake has its time.

    Args:
        listener: bound.
        doors: counts connections.
        door: makes what a new caller will speak with.
        context: of TLS; ``None``: plain text.
    """

    def __init__(
        self,
        listener: socket.socket,
        doors: ConnectionLimiter,
        door: Callable[[], LimitedConnection],
        context: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._doors = doors
        self._door = door
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._silent: dict[int, tuple[socket.socket, LimitedConnection]] = {}
        self._dialled: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin."""
        self._loop.add_reader(self._listener, self._accept)
        self._loop.add_reader(self._epoll, self._read_ready)

    async def close(self) -> None:
        """Take who has dialled and nobody after; those that speak go on."""
        for _ in range(_BACKLOG // _AT_ONCE):
            if not self._accept():
                break
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await self._doors.await_heads()
        self._doors.close_silent()
        self._loop.remove_reader(self._epoll)
        self._epoll.close()

    def _accept(self) -> bool:
        """Whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                caller, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionAbortedError:
                continue  # hung up before it was taken
            except OSError:  # no descriptors: the listener stays ready, so it must not be watched
                self._loop.remove_reader(self._listener)
                self._resting = self._loop.call_later(_REST_SECONDS, self._accept_again)
                return False
            self._take(caller)
        return True

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _take(self, caller: socket.socket) -> None:
        caller.setblocking(False)
        door = self._door()
        if not self._doors.enter(door):
            door.refused = True
            self._dial(caller, door)
            return
        if self._context is None and self._doors.headless <= _SPEAK_AT_ONCE:
            self._dial(caller, door)
            return
        number = caller.fileno()
        self._silent[number] = (caller, door)
        self._epoll.register(number, select.EPOLLIN)
        door.hang_up = lambda: self._release(number).close()

    def _release(self, number: int) -> socket.socket:
        self._epoll.unregister(number)
        return self._silent.pop(number)[0]

    def _read_ready(self) -> None:
        spoke = 0
        for number, _ in self._epoll.poll(0, _AT_ONCE):
            if spoke == _SPEAK_AT_ONCE:
                return  # the others are ready at the next step too
            caller, door = self._silent[number]
            try:
                first = caller.recv(1, socket.MSG_PEEK)
            except OSError:
                first = b""
            if first:
                spoke += 1
                self._dial(self._release(number), door)
            else:  # hung up
                door.abort()

    def _dial(self, caller: socket.socket, door: LimitedConnection) -> None:
        """Give it a transport."""
        door.sender = Sender(caller, encrypted=self._context is not None)
        begun = BegunTask(self._loop, self._shake_hands(caller, door))
        task = begun.task
        door.hang_up = task.cancel
        self._dialled.add(task)

        def over(_: asyncio.Task[None]) -> None:
            self._dialled.discard(task)
            if door.transport is None:
                caller.close()  # which a transport that was made and failed has taken over
                self._doors.leave(door)

        task.add_done_callback(over)
        begun.begin()

    async def _shake_hands(self, caller: socket.socket, door: LimitedConnection) -> None:
        with contextlib.suppress(OSError):  # no TLS, hung up, took too long
            if self._context is None:
                await self._loop.connect_accepted_socket(lambda: door, caller)
                return
            layer = TlsLayer(self._context, None, door)
            transport, _ = await self._loop.connect_accepted_socket(lambda: layer, caller)
            try:
                async with asyncio.timeout(_HANDSHAKE_SECONDS):
                    await layer.ready
            except BaseException:  # also when cancelled, and raised again
                transport.abort()
                raise


class Certificate:
    """A TLS context whose certificate follows its folder.

    Args:
        folder: with certificate and key.
        trust: authority of the other side, which then must have a certificate too.
        dials: for connections that are made, not taken.

    Raises:
        OSError: certificate or key cannot be read.
        ssl.SSLError: they do not belong together.
    """

    def __init__(self, folder: Path, trust: Path | None = None, *, dials: bool = False) -> None:
        self._folder = folder
        self._seen = self._mark()
        self._looked = time.monotonic()
        purpose = ssl.Purpose.SERVER_AUTH if dials else ssl.Purpose.CLIENT_AUTH
        self.context = ssl.create_default_context(purpose, cafile=trust)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if trust is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        tls.check_pair(folder)
        self._load()

    def refresh(self) -> None:
        """Load it again when it was renewed."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        with contextlib.suppress(OSError, ssl.SSLError):  # it is being replaced; look again later
            seen = self._mark()
            if seen != self._seen:
                self._load()
                self._seen = seen

    def _mark(self) -> tuple[int, int]:
        parts = (self._folder / CERTIFICATE, self._folder / KEY)
        return (parts[0].stat().st_mtime_ns, parts[1].stat().st_mtime_ns)

    def _load(self) -> None:
        self.context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)


@contextlib.asynccontextmanager
async def listening(
    connection: MakeProtocol,
    doors: ConnectionLimiter,
    address: str,
    tls_dir: Path | None = None,
    client_ca: Path | None = None,
    *,
    named: str = "",
) -> AsyncIterator[int]:
    """Take callers until the block ends.

    Args:
        connection: makes what speaks HTTP over one connection, as aiohttp's server does.
        doors: counts connections.
        address: ``host:port``; port 0 picks one.
        tls_dir: folder of certificate and key; without it the port is plain text.
        client_ca: authority of the certificates that callers then must have.
        named: what these must name, too: one authority signs for the routers of all leases.

    Yields:
        The port.

    Raises:
        OSError: the port is taken, or the certificate cannot be read.
    """
    certificate = Certificate(tls_dir, client_ca) if tls_dir else None

    def door() -> LimitedConnection:
        if certificate is not None:
            certificate.refresh()
        return LimitedConnection(connection, doors, doors.clock, named)

    host, port = address.rsplit(":", 1)
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, int(port)), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    silent = SilentConnections(listener, doors, door, certificate.context if certificate else None)
    watch = asyncio.create_task(doors.watch())
    silent.open()
    try:
        yield int(listener.getsockname()[1])
    finally:
        watch.cancel()
        await silent.close()
