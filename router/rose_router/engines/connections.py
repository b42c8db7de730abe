"""Kept connections to engines: as much of HTTP/1.1 as a leg needs, parsed by llhttp.

A general client costs a turn more than all the rest that the router does for it. Here a request is
one write, and an answer is a status and bytes as they come. States of a connection:

    asking    --head--> answering --end of message--> idle --asked again--> asking
    answering --left before the end--> ending --end of message--> idle
    any       --closed, garbage, ``hang_up``--> lost
    idle      --``IDLE_SECONDS``, ``PINNED_IDLE_SECONDS``--> lost
    ending    --``END_SECONDS``--> lost
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import socket
import ssl
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import cast
from urllib.parse import urlsplit

import httptools

from rose_router.errors import Unreachable
from rose_router.tls_layer import TlsLayer, plain_socket, write_at_once

# Idle connections end before SGLang's own server closes them (5 s).
IDLE_SECONDS = 2.0
# At the other end of one with a pinned certificate is an engine's host, which keeps idle ones for
# an hour. A handshake costs this process what four turns do, and a trainer's step often pauses
# turns for minutes. They are no more than the turns that ran at once.
PINNED_IDLE_SECONDS = 600.0
# After the last idle one to a host was taken another is opened, so long after it: the burst that
# took it is over by then. Who comes next does not wait for a handshake.
SPARE_SECONDS = 0.005
# A kept connection whose other end closed it says so within a round trip of being used.
STALE_SECONDS = 1.0
# Without a word of the other end's kernel for so long, the host is gone or out of reach. A kept
# connection would else swallow one turn after the other, each until it counts as stalled.
_GONE_SECONDS = 15
_PROBE_SECONDS = 5
_GONE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
# Time for what follows the last event; an engine may be stopped just there.
END_SECONDS = 1.0
CONNECT_SECONDS = 5.0
# An engine that is read more slowly than it writes is made to wait at so many bytes.
_MOST_BYTES = 1 << 20

Place = tuple[str, int, bool, tuple[str, ...]]
"""Host, port, whether it is TLS, SHA-256 of the certificates taken (none: by authority)."""

Take = Callable[[bytes], bool]
"""Takes a piece of a body; false when no more is wanted."""


class Stage(StrEnum):
    """Where a connection stands."""

    ASKING = "asking"
    ANSWERING = "answering"
    ENDING = "ending"
    IDLE = "idle"
    LOST = "lost"


# Named once: to ask an enum for a member takes Python 3.11 as long as five calls of methods, and a
# turn did so a dozen times.
_ASKING, _ANSWERING, _ENDING, _IDLE, _LOST = Stage


@functools.lru_cache(maxsize=4096)
def place_of(url: str) -> tuple[str, int, bool, str]:
    """Host, port, whether it is TLS, and what comes before every path."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    return parts.hostname or "", port, secure, parts.path.rstrip("/")


class Connection(asyncio.Protocol):
    """One connection, one request at a time.

    Attributes:
        status: of the answer under way, 0 before its head has come.
        silent: not one byte of this answer has come.
        asked_at: when it was last asked, in seconds of the loop's clock.
    """

    def __init__(self, pool: Connections, place: Place) -> None:
        self._pool = pool
        self.place = place
        self.stage = _IDLE
        self.status = 0
        self.silent = True
        self.asked_at = 0.0
        self._gone = False
        self._socket = -1
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._size = 0
        self._whole = False
        self._reusable = False
        self._waiter: asyncio.Future[bool] | None = None
        self._take: Take | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until: float | None = None
        self._loop = asyncio.get_running_loop()  # which is a system call to ask for up to 3.11

    # --- the caller's side

    def ask(self, request: bytes) -> None:
        """Send a request, head and body at once."""
        self.stage, self._until = _ASKING, None
        self.status, self.silent, self._whole = 0, True, False
        self.asked_at = self._loop.time()
        self._chunks.clear()
        self._size = 0
        transport, socket = self._transport, self._socket
        if transport is not None:
            # Past the transport, which would wait for all that has come beside the request.
            if socket >= 0 and transport.get_write_buffer_size():
                socket = -1  # an earlier one was answered before it was taken whole
            write_at_once(transport, socket, request)

    def go_on(self, piece: bytes) -> None:
        """Send a further piece of the request."""
        if self._transport is not None:
            self._transport.write(piece)

    def wake_soon(self) -> None:
        """Have whoever waits next look at what has come before."""
        self._loop.call_soon(self._wake)

    async def head(self) -> int:
        """The status, as soon as it is there.

        Raises:
            Unreachable: the host is gone.
            ConnectionResetError: the connection ended before.
        """
        while not self.status:
            await self.next_data()
        return self.status

    async def chunk(self) -> bytes:
        """What has come since the last call; empty at the end of the message.

        Raises:
            Unreachable: the host is gone.
            ConnectionResetError: the connection ended before the message did.
        """
        while not self._chunks:
            if self._whole:
                return b""
            await self.next_data()
        return self._drain()

    def _hand_over(self, take: Take) -> bool:
        """Whether more will come and is wanted, after all that has come."""
        chunks, wanted = self._chunks, True
        if len(chunks) == 1 and self._size <= _MOST_BYTES:  # the usual case, for each event
            self._size = 0
            wanted = take(chunks.pop())
        elif chunks:
            wanted = take(self._drain())
        return wanted and not self._whole

    def _drain(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        if self._size > _MOST_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._size = 0
        return data

    def leave(self) -> None:
        """No more is wanted of the answer; its end is awaited in the background.

        Hanging up earlier would look to the engine like a caller that is lost.
        """
        if self.stage is _LOST:
            return
        if self._whole:
            self._finish_answer()
        else:
            self._set_timer(END_SECONDS, _ENDING)

    def hang_up(self) -> None:
        """End the connection, and with it the request."""
        if self.stage is not _LOST:
            self._set_timer(0, _LOST)
            if self._transport is not None:
                self._transport.abort()

    async def next_data(self, take: Take | None = None) -> bool:
        """Wait until something has come that whoever asked must look at.

        Args:
            take: is given the body of an answer with status 200, in the moment in which it comes;
                false when no more is wanted. What it raises is raised here.

        Returns:
            Whether more is to come and is wanted.

        Raises:
            Unreachable: the host is gone.
            ConnectionResetError: the connection ended before the message did.
        """
        if self.stage is _LOST:
            if self._gone:
                message = f"{self.place[0]}:{self.place[1]} has gone silent"
                raise Unreachable(message)
            message = "the connection ended before the answer did"
            raise ConnectionResetError(message)
        self._waiter, self._take = self._loop.create_future(), take
        try:
            return await self._waiter
        finally:
            self._waiter = self._take = None

    def _wake(self) -> None:
        waiter, take = self._waiter, self._take
        if waiter is None or waiter.done():
            return
        try:
            if take is None or self.stage is _LOST:
                waiter.set_result(True)
            elif self.status == 200:
                if not self._hand_over(take):
                    waiter.set_result(False)
            elif self.status:
                waiter.set_result(True)
        except Exception as error:  # noqa: BLE001  # the waiter's own, not the connection's
            waiter.set_exception(error)

    def _finish_answer(self) -> None:
        if self._reusable:
            self.keep()
        else:
            self.hang_up()

    def keep(self) -> None:
        """Have it used by whoever asks next."""
        pinned = bool(self.place[3])
        self._set_timer(PINNED_IDLE_SECONDS if pinned else IDLE_SECONDS, _IDLE)
        self._pool.give_back(self)

    def _set_timer(self, seconds: float, stage: Stage) -> None:
        """Enter the stage, and end the connection after so long in it; 0 = stay.

        A timer that runs already looks again when it fires: one for each turn would cost more than
        reading the turn's answer.
        """
        self.stage = stage
        if not seconds:
            self._until = None
            if stage is _LOST and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        self._until = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._until:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._until, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._until is None:
            return
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._look)
        else:
            self.hang_up()

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self._transport = cast("asyncio.Transport", transport)
        self._socket = plain_socket(transport)
        self._pool.open.add(self)
        if self.place[3]:
            _probe(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Bytes of the engine."""
        self.silent = False
        if self.stage is _IDLE:
            self.hang_up()  # nobody has asked anything
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.hang_up()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._gone = isinstance(exc, OSError) and exc.errno in _GONE
        self._transport = None  # what TLS keeps is freed now: full collections are rare
        self._set_timer(0, _LOST)
        self._pool.forget(self)
        self._wake()

    # --- llhttp's side

    def on_headers_complete(self) -> None:
        """The head is there."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self.stage = _ANSWERING if self.stage is _ASKING else self.stage

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self.stage is _ENDING:
            return
        self._chunks.append(body)
        self._size += len(body)
        if self._size > _MOST_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if not self.status:
            return  # an interim answer
        self._whole = True
        self._reusable = self._parser.should_keep_alive()
        if self.stage is _ENDING:
            self._finish_answer()


class Connections:
    """All connections to engines; idle ones are used again.

    Attributes:
        open: those that stand, whatever their stage.
    """

    def __init__(self) -> None:
        self.open: set[Connection] = set()
        self._idle: dict[Place, list[Connection]] = {}
        self._spares: dict[Place, asyncio.TimerHandle | asyncio.Task[None]] = {}

    async def ask(
        self,
        place: Place,
        request: bytes,
        take: Take | None = None,
        more: Sequence[bytes] = (),
    ) -> Connection:
        """Send a request and wait for the answer's status, or for all of it.

        A request whose kept connection turns out to be closed, with not one byte received, is sent
        once more on a fresh one: whoever sits at the other end now has not seen it. One that is
        closed later was taken, and may be why its host ended: that is the caller's to judge.

        Args:
            place: where to.
            request: head and body.
            more: the rest of a long body, in pieces between which others have the loop.
            take: is given the body of an answer with status 200, see ``Connection.next_data``;
                without it the caller reads the body.

        Raises:
            Unreachable: nobody takes connections there, or somebody else does; or the host is gone.
            ConnectionResetError: the connection ended before the status came, or the body had.
        """
        kept = self._take(place)
        if place[3] and not self._idle.get(place) and place not in self._spares:
            self._spares[place] = asyncio.get_running_loop().call_later(
                SPARE_SECONDS, self._begin_spare, place
            )
        if kept is not None:
            try:
                return await _send(kept, request, take, more)
            except ConnectionResetError:
                waited = asyncio.get_running_loop().time() - kept.asked_at
                if not kept.silent or waited > STALE_SECONDS:
                    raise
        return await _send(await self._open(place), request, take, more)

    def give_back(self, connection: Connection) -> None:
        """It may be used again."""
        self._idle.setdefault(connection.place, []).append(connection)

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self.open.discard(connection)
        idle = self._idle.get(connection.place, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.place, None)

    def close(self) -> None:
        """End them all: also those whose answers' ends would be awaited for a second more."""
        for spare in self._spares.values():
            spare.cancel()
        for connection in self.open:
            connection.hang_up()

    def _take(self, place: Place) -> Connection | None:
        connections = self._idle.get(place, [])
        while connections:
            connection = connections.pop()
            if connection.stage is _IDLE:
                return connection
        return None

    def _begin_spare(self, place: Place) -> None:
        if self._idle.get(place):
            del self._spares[place]  # one was given back meanwhile
        else:
            self._spares[place] = asyncio.get_running_loop().create_task(self._open_spare(place))

    async def _open_spare(self, place: Place) -> None:
        try:
            spare = await self._open(place)
        except Unreachable:
            return  # a turn that finds it so says so
        finally:
            del self._spares[place]
        if spare.stage is not _LOST:
            spare.keep()

    async def _open(self, place: Place) -> Connection:
        host, port, secure, known = place
        loop = asyncio.get_running_loop()
        context = _context(pinned=bool(known)) if secure else None
        connection, layer = Connection(self, place), None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if context is None:
                    await loop.create_connection(lambda: connection, host, port)
                else:
                    layer = await _secured(TlsLayer(context, host, connection), host, port)
        except OSError as error:
            message = f"{host}:{port}: {error}"
            raise Unreachable(message) from error
        if known and (layer is None or _certificate_digest(layer) not in known):
            connection.hang_up()
            message = f"{host}:{port} shows a certificate that its node has not told us of"
            raise Unreachable(message)
        return connection


@functools.cache
def _context(*, pinned: bool) -> ssl.SSLContext:
    """How TLS is spoken; a pinned certificate is compared by ``_open`` before anything is sent.

    Authorities are read only where one is asked: that holds the loop for 25 ms, in the first turn.
    """
    if not pinned:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _probe(made: socket.socket) -> None:
    """Have the kernel end the connection when the other end's says nothing any more.

    Only at an engine's host, which reads a request whole at once: an engine itself may stand still
    with half of one unread, and to the kernel that looks the same.
    """
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_SECONDS),
        (socket.TCP_KEEPINTVL, _PROBE_SECONDS),
        (socket.TCP_USER_TIMEOUT, _GONE_SECONDS * 1000),
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)


async def _secured(layer: TlsLayer, host: str, port: int) -> TlsLayer:
    """Connect it, up to the end of its handshake."""
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: layer, host, port)
    try:
        await layer.ready
    except BaseException:  # also when cancelled, and raised again
        transport.abort()
        raise
    return layer


def _certificate_digest(layer: TlsLayer) -> str:
    """SHA-256 of the certificate at the other end, in hex."""
    certificate = layer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return hashlib.sha256(certificate or b"").hexdigest()


async def _send(
    connection: Connection, request: bytes, take: Take | None, more: Sequence[bytes]
) -> Connection:
    connection.ask(request)
    try:
        for piece in more:
            await asyncio.sleep(0)
            connection.go_on(piece)
        if more:  # what came meanwhile has woken nobody
            connection.wake_soon()
        if take is None:
            await connection.head()
        else:
            while await connection.next_data(take):
                if connection.status not in {0, 200}:
                    break
    except BaseException:  # also when cancelled, and raised again
        connection.hang_up()
        raise
    return connection
