"""Reading bodies, which callers send for free: long ones are bounded while they come.

| a body | is |
|---|---|
| of a text beyond ``MOST_HISTORY`` | refused from its length or its beginning, unread |
| up to ``LONG_BODY`` | decoded at once |
| with more than ``_MOST_OBJECTS``, or a prompt beyond the context | refused once that has come |
| with one long list of numbers | decoded a slice at a time |
| else | decoded at once when its turn has come, since everybody waits for it |

What a caller goes on sending after his answer is thrown away, as slowly as it would be read.

Next step: ``dialects`` say what is in them.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import hdrs, web

from rose_core.rollouts.requests.fields import Bounds, check_context
from rose_core.unreadable import UNREADABLE
from rose_router.errors import BadRequest, SlowCaller, TooLarge
from rose_router.http.admission.loop_share import LoopShare

BODY_SECONDS = web.AppKey("body_seconds", float)

MOST_HISTORY = 8 << 20
"""Bytes of a conversation: two million tokens of text, which no engine here has context for. What
is longer is refused unread."""
_BEGINNING = 1 << 16
_IDS_OR_TEXT = frozenset({"/generate", "/v1/completions", "/tokenize", "/v1/tokenize"})
"""Routes of prompts that may be ids, of which a context can hold more bytes than of text."""
ARRIVED = web.RequestKey("arrived", bytes)
"""Key of a request under which its body is found, once all of it is here."""
NUMBERS = web.RequestKey("numbers", list[int | float])
"""A long list of a body, which ``LargeBodies.release`` gets when the request is answered."""
LONG_BODY = 1 << 18
"""Bytes of a body that are decoded at once: ids take 9 ns a byte, so a loop is held for 2 ms."""
_MOST_MARKS = 1000
"""Texts and brackets, which take 0.3 ms; no client sends a hundred fields before its prompt."""
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[{}\[\]]', re.DOTALL)


def too_long(length: int) -> TooLarge:
    """A refusal of so much text."""
    message = (
        f"a conversation of {length} bytes, and {MOST_HISTORY} are read at most; leave out or "
        "condense what came first"
    )
    return TooLarge("TooLarge", message)


async def raw_body(request: web.Request) -> bytes:
    """The bytes a caller sent; they are kept.

    Raises:
        TooLarge: it begins as a text that is too long for any context; the rest is not read.
        SlowCaller: it did not come in time.
        BadRequest: it cannot be unpacked.
    """
    kept: bytes | None = request.get(ARRIVED)
    if kept is not None:
        return kept
    try:
        if request.content.is_eof():  # the usual case: it came with the head
            if (whole := _came_with_head(request)) is not None:
                return whole
            return await _received(request)
        async with asyncio.timeout(request.app.get(BODY_SECONDS, 60.0)) as limit:
            return await _received(request, limit)
    except TimeoutError:
        message = "the body did not come in time; send it faster, or in smaller requests"
        raise SlowCaller("SlowCaller", message) from None
    except web.RequestPayloadError as error:
        message = f"the body is not what its headers say: {error}"
        raise BadRequest("Malformed", message) from error


def known_length(request: web.Request) -> int | None:
    """Bytes of a body; ``None`` where it may become any number of them."""
    if hdrs.CONTENT_ENCODING in request.headers:
        return None
    content = request.content
    return content.total_bytes if content.is_eof() else request.content_length


def _came_with_head(request: web.Request) -> bytes | None:
    """Of a body that is all here, what may be decoded at once; ``None`` where it may not.

    aiohttp's own way to it goes through a loop, a copy and two coroutines.
    """
    if hdrs.CONTENT_ENCODING in request.headers:
        return None
    length = request.content.total_bytes
    if length > LONG_BODY or length > request.client_max_size:
        return None
    whole = request[ARRIVED] = request.content.read_nowait()
    return whole


async def _received(request: web.Request, limit: asyncio.Timeout | None = None) -> bytes:
    length = known_length(request)
    if length is not None and length <= LONG_BODY:
        whole = request[ARRIVED] = await request.read()
        return whole
    large = request.app[LARGE_BODIES]
    long = length if length and length > MOST_HISTORY and request.path in _IDS_OR_TEXT else 0
    pieces, size, shape = [], 0, BodyShape(large.bounds)
    async for piece in request.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, size)
        if long and size >= _BEGINNING:
            if _begins_with_text(b"".join(pieces)[:_BEGINNING]):
                raise too_long(long)
            long = 0  # it is none
        # While this waits aiohttp reads no more of the body, and its sender is held back.
        for place in range(0, len(piece), _SLICE):
            began = time.perf_counter()
            shape.feed(piece[place : place + _SLICE])
            taken = time.perf_counter() - began
            await large.slices.pay(taken + _SLICE * _RECEIVED_SECONDS, limit)
    began = time.perf_counter()
    whole = b"".join(pieces)
    pieces.clear()
    await large.slices.pay(time.perf_counter() - began, limit)
    request[ARRIVED], request[_SHAPE] = whole, shape
    return whole


async def pass_by(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Answer a caller who is still sending; the rest is thrown away, for which it pays.

    Closed with bytes unread, the connection would be reset, and many clients never look at the
    answer then. That is what is left for a caller who comes while there are ``_MOST_PASSING``.
    """
    large = request.app[LARGE_BODIES]
    if large.passing >= _MOST_PASSING:
        return response
    await response.prepare(request)
    await response.write_eof()
    large.passing += 1
    try:
        async with asyncio.timeout(_PASSING_SECONDS) as limit:
            async for piece in request.content.iter_any():
                await large.slices.pay(len(piece) * _RECEIVED_SECONDS, limit)
    except (TimeoutError, web.RequestPayloadError):
        pass  # aiohttp closes what is not at its end
    finally:
        large.passing -= 1
    return response


def _begins_with_text(raw: bytes) -> bool:
    """Whether the beginning of an object has a field that is a prompt in words.

    One behind more than ``_MOST_MARKS`` is found when the body is decoded.
    """
    depth, name, texts = 0, b"", False
    for found in itertools.islice(_MARKS.finditer(raw), _MOST_MARKS):
        mark = found[0]
        if mark in b"[{":
            texts = depth == 1 and mark == b"["  # a list of texts, or of messages
            depth += 1
            if texts and name == b'"messages"':
                return True
        elif mark in b"]}":
            depth, texts = depth - 1, False
        elif depth == 1 and not raw[found.end() : found.end() + 8].lstrip().startswith(b":"):
            if name in {b'"text"', b'"prompt"'}:
                return True
        elif depth == 1:
            name = mark
        elif depth == 2 and texts and name in {b'"text"', b'"prompt"'}:
            return True
    return False


def bytes_at_once(request: web.Request) -> bytes | None:
    """A body that is all here and short; ``None``: see ``read_body``."""
    kept: bytes | None = request.get(ARRIVED)
    if kept is not None:
        return kept if len(kept) <= LONG_BODY else None
    content = request.content
    if not content.is_eof() or content.at_eof():  # it is still coming; it is empty
        return None
    try:
        return _came_with_head(request)
    except web.RequestPayloadError:
        return None  # which says it in its own words


def arrived(request: web.Request) -> bytes:
    """The bytes of a body that was read.

    Raises:
        KeyError: it was not.
    """
    return request[ARRIVED]


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object a caller sent.

    Raises:
        BadRequest: it is none.
        TooLarge: it is a text that is too long.
        SlowCaller: it did not come in time.
    """
    raw = await raw_body(request)
    if len(raw) <= LONG_BODY:
        return json_object(raw)
    large = request.app[LARGE_BODIES]
    numbers = request[_SHAPE].numbers
    if numbers and (body := await _in_slices(raw, numbers, large)):
        request[NUMBERS] = body[numbers.name]
        return body
    return await large.holds.hold(partial(json_object, raw))


async def read_around_numbers(request: web.Request) -> dict[str, Any]:
    """The same with a long list of numbers left empty, for whoever looks at the rest alone.

    Raises:
        BadRequest: it is no JSON object, as far as that is looked at.
        TooLarge, SlowCaller: as ``read_body``.
    """
    raw = await raw_body(request)
    found = request[_SHAPE].numbers if len(raw) > LONG_BODY else None
    body = await _without(raw, found, request.app[LARGE_BODIES]) if found is not None else None
    return await read_body(request) if body is None else body


class LargeBodies:
    """The shares of the event loop that bodies above ``LONG_BODY`` have: they come for free.

    Args:
        bounds: of prompts, which are refused by their length before they are decoded.

    Attributes:
        slices: what is received, looked at and decoded a millisecond at a time.
        holds: what is decoded at once, one after the other, for which everybody waits; so little
            that the turns that do are beyond the 99th percentile.
        passing: callers that go on sending after their answer.
    """

    def __init__(self, bounds: Callable[[], Bounds] = Bounds) -> None:
        self.bounds = bounds
        self.slices = LoopShare(1 / 8, 0.03)
        self.holds = LoopShare(1 / 100, 0.05)
        self.passing = 0
        self._releasing: set[asyncio.Task[None]] = set()

    def release(self, numbers: list[int | float], then: Callable[[], None]) -> None:
        """Let go of numbers of which nobody knows any more, a slice at a time.

        Args:
            numbers: a list; a million are freed in 10 ms.
            then: is called when they are gone.
        """
        task = asyncio.get_running_loop().create_task(self._release(numbers, then))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, numbers: list[int | float], then: Callable[[], None]) -> None:
        try:
            while numbers:
                began = time.perf_counter()
                del numbers[-_FREED_AT_ONCE:]
                await self.slices.pay(time.perf_counter() - began)
        finally:
            then()


LARGE_BODIES = web.AppKey("large_bodies", LargeBodies)
"""One for all routes of a router."""

_RECEIVED_SECONDS = 4e-9
"""Of the loop's time, that a byte takes to be received."""
_MOST_OBJECTS = 200_000
"""Lists, objects and fields of a body: so many lists are made in 30 ms, so many fields of an object
in 0.1 s. 16 MiB have room for five million lists and two million fields."""
_SLICE = 1 << 16
_FREED_AT_ONCE = 1 << 15
"""Numbers, in a third of a millisecond."""
_PASSING_SECONDS = 10.0
"""How long a caller may go on sending what nobody reads, without the time he is held back."""
_MOST_PASSING = 32
"""Callers: each may have half a mebibyte here, which no limit of memory counts."""
_FIELD = re.compile(rb'(?<=[{,])\s*"([A-Za-z_]+)"\s*:\s*$')
_NAME_BYTES = 80  # within which a field's name and its colon stand before its list
_NO_MARKS = bytes(set(range(256)).difference(b"[]{}:"))
_PROMPTS = frozenset({"input_ids", "prompt", "token_ids"})
_numbers = msgspec.json.Decoder(list[int | float]).decode


@dataclass(frozen=True, slots=True)
class LongNumbers:
    """A field of the object itself that is a long list of numbers.

    Attributes:
        name: of the field.
        begin: of its first number, in bytes of the body.
        end: of its last one; where its bracket closes.
    """

    name: str
    begin: int
    end: int


class BodyShape:
    """What a JSON object will be made of, told while it comes: a slice is gone through in C.

    Whether a byte stands in a text is exact, also where slices part an escape. What is no JSON is
    left to the decoder.

    Args:
        bounds: of prompts.

    Attributes:
        numbers: the first list of numbers above ``LONG_BODY``.
    """

    def __init__(self, bounds: Callable[[], Bounds]) -> None:
        self._bounds = bounds
        self._in_text = False
        self._half = b""  # a backslash, whose other half is in the next slice
        self._before = b""  # the end of what came before: a name may begin in it
        self._size = 0  # without ``_half``
        self._objects = 0
        self._depth = 0
        self._open: tuple[str, int, int] | None = None  # name, begin, commas of what goes on
        self.numbers: LongNumbers | None = None

    def feed(self, piece: bytes) -> None:
        """Look at what has come.

        Raises:
            TooLarge: there are more lists, objects and fields than any request needs.
            PromptTooLong: a prompt is longer than the context.
        """
        # Escapes become blanks of the same length: a quote that is left begins or ends a text.
        plain = (self._half + piece).replace(rb"\\", b"  ").replace(rb"\"", b"  ")
        self._half = plain[-1:] if plain.endswith(b"\\") else b""
        plain = plain[: len(plain) - len(self._half)]
        parts = plain.split(b'"')
        marks = b"".join(parts[self._in_text :: 2]).translate(None, _NO_MARKS)
        self._in_text ^= len(parts) % 2 == 0
        lists = marks.count(b"[") + marks.count(b"{")
        self._depth += lists - marks.count(b"]") - marks.count(b"}")
        self._objects += lists + marks.count(b":")
        if self._objects > _MOST_OBJECTS:
            message = (
                f"the body holds more than {_MOST_OBJECTS:,} lists, objects and fields; "
                "send what it asks for in several requests"
            )
            raise TooLarge("TooLarge", message)
        if self._open is not None:
            self._go_on(plain)
        if self._open is None:
            self._find_opened(plain)
        self._before = (self._before + plain)[-_NAME_BYTES:]
        self._size += len(plain)

    def _find_opened(self, plain: bytes) -> None:
        """Note a field whose numbers go on in the next slice."""
        begin = plain.rfind(b"[") + 1
        # The list is the object's own, and nothing but numbers has come of it.
        if not begin or self._depth != 2 or self._in_text or not _only_numbers(plain[begin:]):
            return
        found = _FIELD.search((self._before + plain[: begin - 1])[-_NAME_BYTES:])
        if found is not None:
            commas = plain.count(b",", begin)
            self._open = (found[1].decode(), self._size + begin, commas)

    def _go_on(self, plain: bytes) -> None:
        """Count the numbers of the open field, up to its end."""
        if self._open is None:
            return
        name, begin, commas = self._open
        end = plain.find(b"]")
        inside = plain if end < 0 else plain[:end]
        if not _only_numbers(inside):
            self._open = None
            return
        commas += inside.count(b",")
        if name in _PROMPTS:
            check_context(commas + 1, self._bounds(), at_least=True)
        self._open = (name, begin, commas) if end < 0 else None
        if end >= 0 and self.numbers is None and self._size + end - begin >= LONG_BODY:
            self.numbers = LongNumbers(name, begin, self._size + end)


_SHAPE = web.RequestKey("shape", BodyShape)


def _only_numbers(part: bytes) -> bool:
    return not part.translate(None, b"0123456789, \t\r\n.-+eE")


async def _without(raw: bytes, found: LongNumbers, large: LargeBodies) -> dict[str, Any] | None:
    """A body whose one long list of numbers is empty; ``None`` for anything unusual."""
    rest, hold = raw[: found.begin] + raw[found.end :], large.holds.hold
    reading = partial(json_object, rest)
    try:
        body = reading() if len(rest) <= LONG_BODY else await hold(reading)
    except BadRequest:
        return None
    if body.get(found.name) != [] or rest.count(b'"%b"' % found.name.encode()) != 1:
        return None
    return body


async def _in_slices(raw: bytes, found: LongNumbers, large: LargeBodies) -> dict[str, Any] | None:
    """A body with one long list of numbers, decoded a slice at a time.

    ``None`` for anything unusual, which is left to ``json_object``.
    """
    if (body := await _without(raw, found, large)) is None:
        return None
    place, end = found.begin, found.end
    numbers = list[int | float]()
    try:
        while place < end:
            cut = end if end - place <= _SLICE else raw.find(b",", place + _SLICE, end)
            cut = end if cut < 0 else cut
            began = time.perf_counter()
            numbers += _numbers(b"[%b]" % raw[place:cut])
            place = cut + 1
            await large.slices.pay(time.perf_counter() - began)
    except UNREADABLE:
        return None
    return body | {found.name: numbers}


_PAIRS = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]..")


def _half_character(raw: bytes) -> str:
    """Where a body has half a character, as languages write that cut texts by 16 bits."""
    blanked = _PAIRS.sub(lambda pair: b" " * len(pair[0]), raw)
    found = _HALF.search(blanked)
    if found is None:
        return ""
    return (
        f"; byte {found.start()} begins half a character ({found[0].decode()}): cut texts "
        "between characters"
    )


def json_object(raw: bytes) -> dict[str, Any]:
    """A body as an object.

    Raises:
        BadRequest: it is none.
    """
    try:
        body = msgspec.json.decode(raw)
    except UNREADABLE as error:
        message = f"the body is no JSON: {error}{_half_character(raw)}"
        raise BadRequest("Malformed", message) from error
    if not isinstance(body, dict):
        message = f"the body must be a JSON object, not {type(body).__name__}"
        raise BadRequest("Malformed", message)
    return body
