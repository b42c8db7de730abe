"""Streams a turn's events to its caller as they come.

Nearly every event is written in the moment in which the turn holds its tokens, by whoever read them
from the engine: engines send the tokens of a whole batch at once, and an event that waited for
another task's turn would wait for all the others of its batch. For the same reason it is given to
the caller's socket and not to uvloop, which writes when everything that has come is read. Only what
cannot go out at once (errors, a caller that has not taken what was written before) is left to the
caller's task.

Next step: the events come from ``routes.turns`` and the modules named ``..._replies``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from rose_router.http.replies.bare_reply import BareReply
from rose_router.tls_layer import plain_socket, write_at_once
from rose_router.turns.turn import Turn

# What a turn has to say, in a caller's dialect: what is new at every ``next``, and its last events
# once the turn is over.
Events = Iterator[Any]

_ENCODE = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Framing:
    """How a dialect writes events.

    Attributes:
        lines: what one ``next`` gave, as bytes; none where there is nothing new.
        end: what follows the last event.
    """

    lines: Callable[[Any], bytes]
    end: bytes


def _line(event: object) -> bytes:
    return b"data: %b\n\n" % _ENCODE(event)


def _named(events: list[dict[str, Any]]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _ENCODE(event)) for event in events
    )


MARK = msgspec.Raw(b"\0")
"""Stands in an event for what is too long to be written with it; no JSON has a zero byte."""
_MARKED = bytes(MARK)


def _parted(line: bytes, long: Sequence[bytes]) -> list[bytes]:
    """A line in pieces, with what is long in the places of its marks."""
    first, *rest = line.split(_MARKED) if long else (line,)
    pieces = [first]
    for one in rest:
        pieces += [*long, one]
    return pieces


_DONE = b"data: [DONE]\n\n"

PLAIN = Framing(_line, _DONE)
"""One event at a time, as OpenAI's chats have it."""

LINES = Framing(bytes, _DONE)
"""The same of events that are written as lines already, as SGLang's are (``generate_events``)."""

NAMED = Framing(_named, b"")
"""Several at a time, each with its type before it; the last one says that it is the last."""


class _EventReply(BareReply):
    """The answer under the events; all but its end is written by ``Stream``.

    Attributes:
        open: its head is written, and its end is not.
        ended: its end is written.
        in_chunks: each event stands in a chunk; HTTP/1.0 has none.
    """

    def __init__(self, request: web.Request) -> None:
        super().__init__()
        self._answered = request
        self.open = self.ended = False
        self.in_chunks = request.version >= HttpVersion11

    def answer(self, request: web.BaseRequest) -> None:
        """Answer that request, whose connection ends with a body of no known length."""
        if not self.in_chunks:
            self.force_close()
        super().answer(request)

    def framed(self, line: bytes) -> bytes:
        """What stands on the wire for an event: before the first one the head."""
        if line and self.in_chunks:
            line = b"%x\r\n%b\r\n" % (len(line), line)
        if self.open:
            return line
        self.open = True
        encoding = b"Transfer-Encoding: chunked\r\n" if self.in_chunks else b""
        return b"%b%b\r\n%b" % (self.head(self._answered, "text/event-stream"), encoding, line)

    def last(self, line: bytes) -> bytes:
        """The same for the last one, and the end."""
        framed = self.framed(line)
        self.open, self.ended = False, True
        return framed + b"0\r\n\r\n" if self.in_chunks else framed

    async def write_eof(self, data: bytes = b"") -> None:
        """The end is written by then, or the connection has ended.

        Raises:
            ConnectionResetError: the caller has hung up.
        """
        if not self.ended or data:
            message = "the caller hung up before the answer was written"
            raise ConnectionResetError(message)


class Stream:
    """One caller's stream.

    Args:
        request: the caller's.
        turn: what is streamed.
        events: its events, from its first token on or once it is over.
        framing: how they are written.
        long: pieces of what stands in its first event where that has ``MARK``; others have the loop
            between them.
    """

    def __init__(
        self,
        request: web.Request,
        turn: Turn,
        events: Events,
        framing: Framing = PLAIN,
        *,
        long: Sequence[bytes] = (),
    ) -> None:
        self._request = request
        self._turn = turn
        self._events = events
        self._framing = framing
        self._long = long
        self._reply = _EventReply(request)
        self._socket = plain_socket(request.transport)

    async def wait_begun(self) -> bool:
        """Wait until there is something to say, and say it if nothing must be waited for.

        Returns:
            Whether the answer has begun: until then it can still be an error.
        """
        turn = self._turn
        try:
            while not turn.is_over and not turn.first_token_at:
                await turn.changed.wait(self._at_once)
        except Exception:  # whatever it was: a stream that has begun takes no error page
            self._cut_off_begun()
            raise
        return self._reply.open or self._reply.ended

    async def run(self) -> web.StreamResponse:
        """Write until the turn is over; of a caller that does not read the connection ends."""
        try:
            self._reply.answer(self._request)
            await self._write()
        except ConnectionResetError:
            self._cut_off()  # its turn ends with the request
        except Exception:  # whatever it was: a stream that has begun takes no error page
            self._cut_off_begun()
            raise
        return self._reply

    def _cut_off(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    def _cut_off_begun(self) -> None:
        """Have no error stand within an answer that has begun: aiohttp would write it there."""
        if self._reply.open or self._reply.ended:
            self._cut_off()

    async def _write(self) -> None:
        turn, reply, lines = self._turn, self._reply, self._framing.lines
        while not turn.is_over:
            if (line := lines(next(self._events))) or not reply.open:
                for piece in _parted(line, self._long):
                    await self._send(reply.framed(piece))
                self._long = self._long if _MARKED in line else ()
            if not turn.is_over:  # it may have ended while the caller was waited for
                await turn.changed.wait(self._at_once)
        if not reply.ended:
            *before, last = _parted(self._rest(), self._long)
            for piece in before:
                await self._send(reply.framed(piece))
            await self._send(reply.last(last))
        else:  # which its caller may not have taken yet
            await self._wait_taken()

    def _rest(self) -> bytes:
        """All that is left to say: nothing more is waited for, and it goes out in one piece."""
        last = b"".join([self._framing.lines(event) for event in self._events])
        return last + self._framing.end

    def _at_once(self) -> bool:
        """Write what is new, if it can be written without waiting."""
        transport, turn, reply = self._request.transport, self._turn, self._reply
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        if self._long:
            return False  # its task writes, and gives the loop away
        if turn.is_over:
            if reply.open:
                write_at_once(transport, self._socket, reply.last(self._rest()))
            return False  # its task has to end
        if not turn.first_token_at:
            return False
        if not reply.open:
            reply.answer(self._request)
        line = self._framing.lines(next(self._events))
        if line or not reply.open:  # an empty chunk would end the reply
            write_at_once(transport, self._socket, reply.framed(line))
        return True

    async def _send(self, data: bytes) -> None:
        protocol = self._request.protocol
        transport = protocol.transport
        if transport is None or transport.is_closing():
            message = "the caller hung up before the event was written"
            raise ConnectionResetError(message)
        transport.write(data)
        if self._long:
            await asyncio.sleep(0)
        await self._wait_taken()

    async def _wait_taken(self) -> None:
        """Wait until the caller has taken enough of what was written."""
        if self._request.protocol.writing_paused:
            await self._request.writer.drain()


class MergedStream:
    """One caller's stream of several answers, each event with its answer's index.

    Args:
        request: the caller's.
        voices: turns, and the events of each.
        last: what follows when all are over.
        long: by voice, as in ``Stream``.
    """

    def __init__(
        self,
        request: web.Request,
        voices: Sequence[tuple[Turn, Events]],
        last: Callable[[], Iterable[object]],
        long: Sequence[Sequence[bytes]] = (),
    ) -> None:
        self._request, self._voices, self._last = request, voices, last
        self._long = long or [()] * len(voices)
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._turn_to_write = asyncio.Lock()

    async def run(self) -> web.StreamResponse:
        """Write until all turns are over; see ``Stream.run``."""
        try:
            await self._response.prepare(self._request)
            async with asyncio.TaskGroup() as group:
                for (turn, events), long in zip(self._voices, self._long, strict=True):
                    group.create_task(self._speak(turn, events, long))
            rest = b"".join(map(_line, self._last()))
            await self._response.write_eof(rest + PLAIN.end)
        except* ConnectionResetError:
            if self._request.transport is not None:
                self._request.transport.abort()
        return self._response

    async def _speak(self, turn: Turn, events: Events, long: Sequence[bytes]) -> None:
        while not turn.is_over:
            await self._write(_line(next(events)), long)
            if not turn.is_over:
                await turn.changed.wait()
        for event in events:
            await self._write(_line(event), long)

    async def _write(self, line: bytes, long: Sequence[bytes]) -> None:
        async with self._turn_to_write:
            first, *more = _parted(line, long)
            await self._response.write(first)
            for piece in more:
                await asyncio.sleep(0)
                await self._response.write(piece)
