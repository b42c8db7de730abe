"""An answer of a turn: what aiohttp's responses ask of each answer is not asked of these.

aiohttp's response can be compressed, chunked, prepared by signals and given cookies, and asks about
each of them for every answer. A turn's has none of that, and what its head says is known. Errors
and pages stay aiohttp's.

``JsonReply`` is one that is whole. Next step: ``streaming`` writes one event after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from aiohttp import HttpVersion, HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE


@lru_cache(64)
def _head(version: HttpVersion, date: str, content: str, connection: str) -> bytes:
    """The same for all answers of a second."""
    status = f"HTTP/{version.major}.{version.minor} 200 OK"
    known = f"Content-Type: {content}\r\nDate: {date}\r\nServer: {SERVER_SOFTWARE}\r\n{connection}"
    return f"{status}\r\n{known}".encode("ascii")


class BareReply(web.StreamResponse):
    """Status 200 and a body that whoever inherits from it writes."""

    def __init__(self) -> None:
        super().__init__()
        self._closes = False
        self._stays = False
        self._request: web.BaseRequest | None = None

    @property
    def keep_alive(self) -> bool:
        """Whether the connection is used again; its head may have been written before it ended."""
        return self._stays and not self._closes

    @property
    def prepared(self) -> bool:
        """Whether it is known whom it answers."""
        return self._request is not None

    def force_close(self) -> None:
        """Have the caller come over another connection the next time."""
        self._closes = True

    async def prepare(self, request: web.BaseRequest) -> None:
        """Answer that request; nothing is written yet."""
        self.answer(request)

    def answer(self, request: web.BaseRequest) -> None:
        """The same for those who do not wait."""
        if self._request is None:
            self._request, self._stays = request, request.keep_alive and not self._closes

    def head(self, request: web.BaseRequest, content: str) -> bytes:
        """All of its head but for the length of its body and the empty line.

        Args:
            request: whom it answers.
            content: its type.
        """
        connection = ""
        if request.version >= HttpVersion11:
            if not self._stays:
                connection = "Connection: close\r\n"
        elif self._stays:
            connection = "Connection: keep-alive\r\n"
        return _head(request.version, rfc822_formatted_time(), content, connection)


class JsonReply(BareReply):
    """An answer that is whole: head and body in one write, for a tenth of aiohttp's steps.

    Args:
        body: JSON.
        more: the rest of a long one, in pieces between which others have the loop.
    """

    def __init__(self, body: bytes, more: Sequence[bytes] = ()) -> None:
        super().__init__()
        self._json, self._more = body, more

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
        self._json, more, self._more = b"", self._more, ()
        protocol = request.protocol
        transport = protocol.transport
        if transport is None or transport.is_closing():
            message = "the caller hung up before the answer was written"
            raise ConnectionResetError(message)
        head = self.head(request, "application/json")
        length = len(body) + sum(map(len, more)) if more else len(body)
        transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, length, body))
        for piece in more:
            await (request.writer.drain() if protocol.writing_paused else asyncio.sleep(0))
            transport.write(piece)  # into the void, where its caller has hung up
        if protocol.writing_paused:
            await request.writer.drain()  # its connection ends when the caller does not read
