"""A JSON answer that is whole: head and body in one write, for a tenth of aiohttp's steps."""

from __future__ import annotations

from rose_router.http.replies.bare_reply import BareReply


class JsonReply(BareReply):
    """Status 200 with a body.

    Args:
        body: JSON.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._json = body

    async def write_eof(self, data: bytes = b"") -> None:
        """Write all of it; once, as callers of aiohttp's own may call twice.

        Raises:
            ConnectionResetError: the caller has hung up.
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
        if protocol.writing_paused:
            await request.writer.drain()  # its connection ends when the caller does not read
