"""A JSON answer that is whole: head and body in one write, for a tenth of aiohttp's steps."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rose_router.http.replies.bare_reply import BareReply

LEAST_RATE = 1 << 16
"""Bytes of a second that a caller reads at least, once its ``write_seconds`` are over: transports
hold as much before they ask whoever writes to wait, so a stream's caller must read no less."""


class JsonReply(BareReply):
    """Status 200 with a body.

    Args:
        body: JSON.
        write_seconds: until its caller must have read it, and a second more for every
            ``LEAST_RATE`` bytes.
    """

    def __init__(self, body: bytes, write_seconds: float) -> None:
        super().__init__()
        self._json, self._write_seconds = body, write_seconds

    async def write_eof(self, data: bytes = b"") -> None:
        """Write all of it; once, as callers of aiohttp's own may call twice.

        Raises:
            ConnectionResetError: the caller has hung up, or has not read it in time.
        """
        request, body = self._request, self._json + data
        if request is None:
            message = "an answer is prepared before it is written"
            raise RuntimeError(message)
        if not body:
            return
        self._json = b""
        protocol = request.protocol
        transport = protocol.transport
        if transport is None or transport.is_closing():
            message = "the caller hung up before the answer was written"
            raise ConnectionResetError(message)
        head = self.head(request, "application/json")
        transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        if protocol.writing_paused:  # a caller that does not read is waited for
            await self._wait_taken(request, transport, len(body))

    async def _wait_taken(
        self, request: web.BaseRequest, transport: asyncio.Transport, length: int
    ) -> None:
        """Wait for a caller that reads; one that does not is taken for gone.

        Raises:
            ConnectionResetError: it is.
        """
        try:
            async with asyncio.timeout(self._write_seconds + length / LEAST_RATE):
                await request.writer.drain()
        except TimeoutError:
            transport.abort()
            message = f"the caller did not read its answer of {length} bytes in time"
            raise ConnectionResetError(message) from None
