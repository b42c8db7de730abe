"""A JSON answer that is whole: head and body in one write.

aiohttp's response can be compressed, chunked, prepared by signals and given cookies, and asks about
each of them for every answer. A turn's has none of that, and what its head says is known; so this
one does without, and takes a tenth of the interpreter's steps. Errors and pages stay aiohttp's.
"""

from __future__ import annotations

from functools import lru_cache

from aiohttp import HttpVersion, HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE


@lru_cache(16)
def _head(version: HttpVersion, date: str, said: str) -> tuple[bytes, bytes]:
    """What stands before the body's length and behind it, the same for all answers of a second."""
    status = f"HTTP/{version.major}.{version.minor} 200 OK"
    before = f"{status}\r\nContent-Type: application/json\r\nContent-Length: "
    after = f"\r\nDate: {date}\r\nServer: {SERVER_SOFTWARE}\r\n{said}\r\n"
    return before.encode("ascii"), after.encode("ascii")


class JsonReply(web.StreamResponse):
    """Status 200 with a body.

    Args:
        body: JSON.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._json = body
        self._closes = False
        self._stays = False
        self._request: web.BaseRequest | None = None

    @property
    def keep_alive(self) -> bool:
        """Whether the connection is used again."""
        return self._stays

    @property
    def prepared(self) -> bool:
        """Whether it is known whom it answers."""
        return self._request is not None

    def force_close(self) -> None:
        """Have the caller come over another connection the next time."""
        self._closes = True

    async def prepare(self, request: web.BaseRequest) -> None:
        """Answer that request; nothing is written yet."""
        if self._request is None:
            self._request, self._stays = request, request.keep_alive and not self._closes

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
        protocol, version, said = request.protocol, request.version, ""
        transport = protocol.transport
        if transport is None or transport.is_closing():
            message = "the caller hung up before the answer was written"
            raise ConnectionResetError(message)
        if version >= HttpVersion11:
            if not self._stays:
                said = "Connection: close\r\n"
        elif self._stays:
            said = "Connection: keep-alive\r\n"
        before, after = _head(version, rfc822_formatted_time(), said)
        transport.write(b"%b%d%b%b" % (before, len(body), after, body))
        if protocol.writing_paused:  # a caller that does not read is waited for
            await request.writer.drain()
