"""TLS beneath a connection to an engine: what has come is decrypted in the call in which it comes.

uvloop's own reads until OpenSSL raises that nothing is left, so once in vain for every piece, and
for each of these it makes room for 256 KiB. Here a record is read when there is one. As with
uvloop's, nothing is sent before the handshake is over, and the end of the stream is for HTTP to
judge: a message that is not whole is not taken for whole.

    shaking hands --both sides agree--> open --closed, no TLS, ``abort``--> over
    shaking hands --closed, no agreement--> over

Next step: ``connections`` compares the certificate of a pinned connection before it is used.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast

_RECORD = 1 << 14
"""Bytes of plain text in the longest record of TLS."""
_MOST_OUTGOING = 16 * _RECORD
"""Bytes of a request that wait to be sent: OpenSSL keeps as much memory as ever waited."""


class TlsLayer(asyncio.Protocol):
    """A protocol of its transport, and a transport of the protocol above it.

    Args:
        context: how TLS is spoken.
        name: of the host, which its certificate must name where the context says so.
        above: gets a connection when hands are shaken, and then what was decrypted.

    Attributes:
        ready: done when hands are shaken; its error is an ``OSError``.
    """

    def __init__(self, context: ssl.SSLContext, name: str, above: asyncio.Protocol) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._above = above
        self._transport: asyncio.Transport | None = None
        self._open = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to shake hands."""
        self._transport = cast("asyncio.Transport", transport)
        self._shake_hands()

    def data_received(self, data: bytes) -> None:
        """Bytes of the other side."""
        self._incoming.write(data)
        if self._open:
            self._read(len(data))
        else:
            self._shake_hands()

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
            self._read(_RECORD)

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

    def write(self, data: bytes) -> None:
        """Send, in one write unless it is long; where TLS takes nothing now, end it."""
        if not self._open:
            return
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

    def get_extra_info(self, name: str) -> Any:  # noqa: ANN401  # of any kind, as asyncio's
        """The transport's; ``ssl_object`` is this one's."""
        if name == "ssl_object":
            return self._tls
        return None if self._transport is None else self._transport.get_extra_info(name)
