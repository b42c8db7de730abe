"""Streams a turn's events to its caller as they come.

Nearly every event is written in the moment in which the turn holds its tokens, by whoever read them
from the engine: engines send the tokens of a whole batch at once, and an event that waited for
another task's turn would wait for all the others of its batch. Only what cannot go out at once (the
head, the end, a caller that has not taken what was written before) is left to the caller's task.

Next step: the events come from ``routes.turns`` and the modules named ``..._replies``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from rose_router.turns.turn import Turn

# What a turn has to say, in a caller's dialect: what is new at every ``next``, and its last events
# once the turn is over.
Events = Iterator[Any]

# Whoever has taken everything before can be written so much without waiting (half of what asyncio
# buffers), and no timer is needed.
_SMALL = 32 * 1024
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


PLAIN = Framing(_line, b"data: [DONE]\n\n")
"""One event at a time, as OpenAI's chats and SGLang have it."""

NAMED = Framing(_named, b"")
"""Several at a time, each with its type before it; the last one says that it is the last."""


class _Response(web.StreamResponse):
    """A stream whose head travels with its first event, in one write."""

    _send_headers_immediately = False


class Stream:
    """One caller's stream.

    Args:
        request: the caller's.
        turn: has a token to show, or is over with something to say.
        events: what it says.
        write_seconds: until the caller must have taken an event.
        framing: how they are written.
    """

    def __init__(
        self,
        request: web.Request,
        turn: Turn,
        events: Events,
        write_seconds: float,
        framing: Framing = PLAIN,
    ) -> None:
        self._request = request
        self._turn = turn
        self._events = events
        self._framing = framing
        self._write_seconds = write_seconds
        self._response = _Response(headers={"Content-Type": "text/event-stream"})
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self._response.enable_chunked_encoding()

    async def run(self) -> web.StreamResponse:
        """Write until the turn is over; a caller that hangs up or does not read is cut off."""
        try:
            await self._response.prepare(self._request)
            await self._write()
        except (ConnectionResetError, TimeoutError):
            # Its turn ends with the request.
            if self._request.transport is not None:
                self._request.transport.abort()
        return self._response

    async def _write(self) -> None:
        turn, response, lines = self._turn, self._response, self._framing.lines
        while not turn.is_over:
            await self._send(lines(next(self._events)), response.write)
            if not turn.is_over:  # it may have ended while the caller was waited for
                await turn.changed.wait(self._at_once)
        # Nothing more is waited for: the end goes out in one piece.
        last = b"".join(lines(event) for event in self._events)
        await self._send(last + self._framing.end, response.write_eof)

    def _at_once(self) -> bool:
        """Write what is new, if it can be written without waiting."""
        transport = self._request.transport
        if self._turn.is_over or transport is None or transport.is_closing() or _behind(transport):
            return False
        line = self._framing.lines(next(self._events))
        if not line:
            return True  # an empty chunk would end the reply
        transport.write(b"%x\r\n%b\r\n" % (len(line), line) if self._chunked else line)
        return True

    async def _send(self, line: bytes, write: Callable[[bytes], Awaitable[None]]) -> None:
        transport = self._request.transport
        if len(line) > _SMALL or (transport is not None and _behind(transport)):
            async with asyncio.timeout(self._write_seconds):
                await write(line)
        else:
            await write(line)


class MergedStream:
    """One caller's stream of several answers, each event with its answer's index.

    Args:
        request: the caller's.
        voices: turns, and what each says.
        write_seconds: until the caller must have taken an event.
        last: what follows when all are over.
    """

    def __init__(
        self,
        request: web.Request,
        voices: Sequence[tuple[Turn, Events]],
        write_seconds: float,
        last: Callable[[], list[object]],
    ) -> None:
        self._request, self._voices, self._last = request, voices, last
        self._write_seconds = write_seconds
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._turn_to_write = asyncio.Lock()

    async def run(self) -> web.StreamResponse:
        """Write until all turns are over; see ``Stream.run``."""
        try:
            await self._response.prepare(self._request)
            async with asyncio.TaskGroup() as group:
                for turn, events in self._voices:
                    group.create_task(self._speak(turn, events))
            rest = b"".join(map(_line, self._last()))
            await self._response.write_eof(rest + PLAIN.end)
        except* (ConnectionResetError, TimeoutError):
            if self._request.transport is not None:
                self._request.transport.abort()
        return self._response

    async def _speak(self, turn: Turn, events: Events) -> None:
        while not turn.is_over:
            await self._write(_line(next(events)))
            if not turn.is_over:
                await turn.changed.wait()
        for event in events:
            await self._write(_line(event))

    async def _write(self, line: bytes) -> None:
        async with self._turn_to_write, asyncio.timeout(self._write_seconds):
            await self._response.write(line)


def _behind(transport: asyncio.Transport) -> bool:
    """Whether the caller has not taken yet what was written before."""
    return transport.get_write_buffer_size() > 0
