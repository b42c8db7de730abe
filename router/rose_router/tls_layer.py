"""TLS beneath connections: what has come is decrypted in the call in which it comes.

uvloop's own reads until OpenSSL raises that nothing is left, so once in vain for every piece, and
for each of these it makes room for 256 KiB. What it is given to send it keeps until all that has
come is read, and whoever wrote a long answer is never asked to wait for a side that does not read.
Here a record is read when there is one, an event is sent at once, and who does not read is the
transport's to tell. As with uvloop's, nothing is sent before the handshake is over, and the end of
the stream is for HTTP to judge: a message that is not whole is not taken for whole.

    shaking hands --both sides agree--> open --closed, no TLS, ``abort``--> over
    shaking hands --closed, no agreement--> over

Next step: ``engines.connections`` compares the certificate of a pinned connection before it is
used; ``listener`` takes callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterable
from typing import Any, cast

_RECORD = 1 << 14
"""Bytes of plain text in the longest record of TLS."""
_MOST_OUTGOING = 16 * _RECORD
"""Bytes of a request that wait to be sent: OpenSSL keeps as much memory as ever waited."""


class TlsLayer(asyncio.Protocol):
    """A protocol of its transport, and a transport of the protocol above it.

    Args:
        context: how TLS is spoken.
        name: of the host, which its certificate must name where the context says so; ``None``: it
            has dialled us.
        above: gets a connection when hands are shaken, and then what was decrypted.

    Attributes:
        ready: done when hands are shaken; its error is an ``OSError``.
    """

    def __init__(self, context: ssl.SSLContext, name: str | None, above: asyncio.Protocol) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=name is None, server_hostname=name
        )
        self._dialled = name is None
        self._above = above
        self._socket = -1
        self._transport: asyncio.Transport | None = None
        self._open = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to shake hands."""
        self._transport = cast("asyncio.Transport", transport)
        made = transport.get_extra_info("socket")
        self._socket = -1 if made is None else int(made.fileno())
        self._shake_hands()

    def data_received(self, data: bytes) -> None:
        """Bytes of the other side."""
        self._incoming.write(data)
        if self._open:
            if self._dialled:
                self._read_together()
            else:
                self._read(len(data))
        else:
            self._shake_hands()

    def pause_writing(self) -> None:
        """The other side reads too slowly."""
        if self._open:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._open:
            self._above.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        if self._open:
            self._open = False
            self._above.connection_lost(exc)
        elif not self.ready.done():
            self.ready.set_exception(exc or ConnectionResetError("it ended in the TLS handshake"))

    def _shake_hands(self) -> None:
        if self.ready.done():
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._flush()  # the alert says why
            self.ready.set_exception(error)
            if self._transport is not None:
                self._transport.close()
            return
        self._flush()
        self._open = True
        self._above.connection_made(cast("asyncio.BaseTransport", self))
        self.ready.set_result(None)
        if self._incoming.pending:
            if self._dialled:
                self._read_together()
            else:
                self._read(_RECORD)

    def _read_together(self) -> None:
        """Hand on all that is here in one piece: a request that comes whole is answered as such."""
        pieces, ended, broken = list[bytes](), False, False
        tls, incoming = self._tls, self._incoming
        size = min(incoming.pending, _RECORD)  # as much room is made for it
        try:
            while size:
                piece = tls.read(size)
                if not piece:
                    ended = True
                    break
                pieces.append(piece)
                size = tls.pending() or min(incoming.pending, _RECORD)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            broken = True
        self._flush_if_any()
        if pieces:
            self._above.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if broken:
            self.abort()
        elif ended:
            self.close()

    def _read(self, most: int) -> None:
        """Hand on all that is here; of less than a record nothing comes yet."""
        tls, above = self._tls, self._above
        size = min(most, _RECORD)
        try:
            while self._open:
                piece = tls.read(size)
                if not piece:
                    break  # the other side says that nothing follows
                above.data_received(piece)
                size = tls.pending()  # of a record whose end alone came now, all the rest
                if not size:
                    size = min(self._incoming.pending, _RECORD)
                    if not size:
                        return self._flush_if_any()
        except ssl.SSLWantReadError:
            return self._flush_if_any()
        except ssl.SSLError:
            pass
        self.abort()
        return None

    def _flush_if_any(self) -> None:
        if self._outgoing.pending:  # an answer of TLS itself, to new keys
            self._flush()

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._outgoing.read())

    # --- the side above

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, in one write unless it is long; where TLS takes nothing now, end it."""
        if not self._open or not data or self.is_closing():
            return  # what was given before ``close`` is still on its way
        try:
            if len(data) <= _MOST_OUTGOING:
                self._tls.write(data)  # all of it: what is written to is memory
            else:
                self._write_long(memoryview(data))
        except ssl.SSLError:  # it has failed, or the other side shakes hands anew
            self.abort()
            return
        self._flush()

    def _write_long(self, data: memoryview) -> None:
        for begin in range(0, len(data), _MOST_OUTGOING):
            self._tls.write(data[begin : begin + _MOST_OUTGOING])
            self._flush()

    def write_now(self, data: bytes) -> None:
        """Send to a side that has taken all before, past the transport, which would wait."""
        transport = self._transport
        if transport is None or self._socket < 0 or transport.get_write_buffer_size():
            self.write(data)
            return
        if not self._open or transport.is_closing():
            return
        try:
            self._tls.write(data)
        except ssl.SSLError:
            self.abort()
            return
        record = self._outgoing.read()
        try:
            taken = os.write(self._socket, record)
        except OSError:
            taken = 0  # its buffer is full, or it is gone: its transport finds out which
        if taken < len(record):
            transport.write(record[taken:])

    def writelines(self, lines: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send them, one behind the other."""
        self.write(b"".join(lines))

    def close(self) -> None:
        """Say that nothing follows, and end it once all is sent."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._open:
            with contextlib.suppress(ssl.SSLError):  # the other side's end is not waited for
                self._tls.unwrap()
            self._flush_if_any()
        transport.close()

    def is_closing(self) -> bool:
        """Whether it takes nothing more."""
        return self._transport is None or self._transport.is_closing()

    def is_reading(self) -> bool:
        """Whether the other side is heard."""
        return self._transport is not None and self._transport.is_reading()

    def get_write_buffer_size(self) -> int:
        """Bytes that are not sent yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """End it."""
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        """Let the other side wait."""
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def get_extra_info(
        self,
        name: str,
        default: Any = None,  # noqa: ANN401  # of any kind, as asyncio's
    ) -> Any:  # noqa: ANN401
        """The transport's; what is said of TLS is this one's."""
        if name == "ssl_object":
            return self._tls
        if name == "sslcontext":
            return self._tls.context
        if name == "peercert":
            return self._tls.getpeercert()
        return default if self._transport is None else self._transport.get_extra_info(name, default)


def plain_socket(transport: asyncio.BaseTransport | None) -> int:
    """Descriptor of a transport's socket; -1 where what is written must be encrypted first."""
    if transport is None or transport.get_extra_info("sslcontext") is not None:
        return -1
    other = transport.get_extra_info("socket")
    return -1 if other is None else int(other.fileno())


def write_at_once(transport: asyncio.Transport | TlsLayer, socket: int, data: bytes) -> None:
    """Write now to a side that has taken all before.

    uvloop keeps what it is given until everything that has come is read: a request or an event
    would wait for all events of the batch beside it to be dealt with.
    """
    if isinstance(transport, TlsLayer):
        transport.write_now(data)
        return
    if socket >= 0:
        try:
            taken = os.write(socket, data)
        except OSError:
            taken = 0  # its buffer is full, or it is gone: its transport finds out which
        data = data[taken:]
    if data:
        transport.write(data)
