"""Reading bodies, which callers send for free: long ones are bounded before they are made.

| a body | is |
|---|---|
| of a text beyond ``MOST_HISTORY`` | refused from its length or its beginning, unread |
| up to ``_WHOLE`` | decoded at once |
| with one long list of numbers | received and decoded a slice at a time |
| with more than ``_MOST_OBJECTS`` | refused before these are made |
| else | decoded at once when its turn has come, since everybody waits for it |

Next step: ``dialects`` say what is in them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from rose_core.rollouts.fields import Bounds, check_context
from rose_core.unreadable import UNREADABLE
from rose_router.errors import BadRequest, SlowCaller, TooLarge
from rose_router.http.loop_share import LoopShare

BODY_SECONDS = web.AppKey("body_seconds", float)

MOST_HISTORY = 8 << 20
"""Bytes of a conversation: two million tokens of text, which no engine here has context for. What
is longer is refused unread."""
_ARRIVED = web.RequestKey("arrived", bytes)
_BEGINNING = 1 << 16
_IDS_OR_TEXT = frozenset({"/generate", "/v1/completions", "/tokenize", "/v1/tokenize"})
"""Routes of prompts that may be ids, of which a context can hold more bytes than of text."""
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[{}\[\]]', re.DOTALL)


def too_long(length: int) -> TooLarge:
    """A refusal of so much text."""
    message = (
        f"a conversation of {length} bytes, and {MOST_HISTORY} are read at most; leave out or "
        "condense what came first"
    )
    return TooLarge("TooLarge", message)


async def raw_body(request: web.Request, limit: asyncio.Timeout | None = None) -> bytes:
    """The bytes a caller sent; they are kept.

    Args:
        request: whose.
        limit: of the time that the caller may take to send them.

    Raises:
        TooLarge: it begins as a text that is too long for any context; the rest is not read.
    """
    length = request.content_length
    if length is not None and length <= _WHOLE:
        return await request.read()
    kept: bytes | None = request.get(_ARRIVED)
    if kept is not None:
        return kept
    share = request.app[LARGE_BODIES].slices
    long = length if length and length > MOST_HISTORY and request.path in _IDS_OR_TEXT else 0
    pieces, size, looked = [], 0, False
    async for piece in request.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, size)
        if long and not looked and size >= _BEGINNING:
            looked = True
            if _begins_with_text(b"".join(pieces)[:_BEGINNING]):
                raise too_long(long)
        if size > _WHOLE:
            # While this waits aiohttp reads no more of the body, and its sender is held back.
            await share.pay(len(piece) * _RECEIVED_SECONDS, limit)
    request[_ARRIVED] = whole = b"".join(pieces)
    return whole


def _begins_with_text(raw: bytes) -> bool:
    """Whether the beginning of an object has a field that is a prompt in words."""
    depth, name, texts = 0, b"", False
    for found in _MARKS.finditer(raw):
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


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object a caller sent.

    Raises:
        BadRequest: it is none.
        TooLarge: it is a text that is too long.
        SlowCaller: it did not come in time.
    """
    try:
        if request.content.is_eof():  # the usual case: it came with the head
            raw = await raw_body(request)
        else:
            async with asyncio.timeout(request.app.get(BODY_SECONDS, 60.0)) as limit:
                raw = await raw_body(request, limit)
    except TimeoutError:
        message = "the body did not come in time; send it faster, or in smaller requests"
        raise SlowCaller("SlowCaller", message) from None
    if len(raw) <= _WHOLE:
        return json_object(raw)
    large = request.app[LARGE_BODIES]
    return await _in_slices(raw, large) or await _at_once(raw, large)


class LargeBodies:
    """The shares of the event loop that bodies above ``_WHOLE`` have: callers send them for free.

    Args:
        bounds: of prompts, which are refused by their length before they are decoded.

    Attributes:
        slices: what is received, looked at and decoded a millisecond at a time.
        holds: what is decoded at once, one after the other, for which everybody waits; so little
            that the turns that do are beyond the 99th percentile.
    """

    def __init__(self, bounds: Callable[[], Bounds] = Bounds) -> None:
        self.bounds = bounds
        self.slices = LoopShare(1 / 8, 0.1)
        self.holds = LoopShare(1 / 100, 0.05)


LARGE_BODIES = web.AppKey("large_bodies", LargeBodies)
"""One for all routes of a router."""

_WHOLE = 1 << 18
"""Bytes of a body that are decoded at once: ids take 9 ns a byte, so a loop is held for 2 ms."""
_RECEIVED_SECONDS = 4e-9
"""Of the loop's time, that a byte takes to be received."""
_MOST_OBJECTS = 200_000
"""Lists, objects and fields of a body: so many lists are made in 30 ms, so many fields of an object
in 0.1 s. 16 MiB have room for five million lists and two million fields."""
_OBJECTS = (b"{", b"[", b":")
_SLICE = 1 << 16
_LONG_NUMBERS = re.compile(rb'":\s*\[\s*-?\d')
_FIELD = re.compile(rb'(?<=[{,])\s*"([A-Za-z_]+)$')
_PROMPTS = frozenset({"input_ids", "prompt", "token_ids"})
_MOST_LISTS = 256  # that are looked at before a body counts as usual
_numbers = msgspec.json.Decoder(list[int | float]).decode


async def _at_once(raw: bytes, large: LargeBodies) -> dict[str, Any]:
    """A body that is decoded whole, once it is known not to hold the loop for long."""
    if sum(raw.count(mark) for mark in _OBJECTS) > _MOST_OBJECTS:  # in texts, too
        await _check_objects(raw, large.slices)
    return await large.holds.hold(partial(json_object, raw))


async def _check_objects(raw: bytes, share: LoopShare) -> None:
    """Raises ``TooLarge`` where there are more lists, objects and fields than any request needs."""
    place, quotes, opened = 0, 0, 0
    while place < len(raw):
        began = time.perf_counter()
        piece = raw[place : place + _SLICE].replace(b"\\\\", b"")
        place += _SLICE + piece.endswith(b"\\")  # what that escapes is in the next slice
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b" ".join(parts[quotes % 2 :: 2])  # of texts
        quotes += len(parts) - 1
        opened += sum(outside.count(mark) for mark in _OBJECTS)
        if opened > _MOST_OBJECTS:
            message = (
                f"the body holds more than {_MOST_OBJECTS:,} lists, objects and fields; "
                "send what it asks for in several requests"
            )
            raise TooLarge("TooLarge", message)
        await share.pay(time.perf_counter() - began)


async def _in_slices(raw: bytes, large: LargeBodies) -> dict[str, Any] | None:
    """A body with one long list of numbers, decoded a slice at a time; ``None``: no such body.

    What is found between two quotes may be no field's name but stand in a text: it counts only if
    the rest, decoded without the numbers, has just that field of its own, once and empty. Anything
    unusual is left to ``json_object``.

    Raises:
        UnsafeTurn: the numbers are a prompt that is longer than the context.
        TooLarge: there are too many objects beside them.
    """
    found = _long_numbers(raw)
    if found is None:
        return None
    name, begin, end = found
    rest = raw[:begin] + raw[end:]
    try:
        body = json_object(rest) if len(rest) <= _WHOLE else await _at_once(rest, large)
    except BadRequest:
        return None
    if body.get(name) != [] or raw.count(b'"%b"' % name.encode()) != 1:
        return None
    if name in _PROMPTS:
        check_context(raw.count(b",", begin, end) + 1, large.bounds())
    place, numbers = begin, list[int | float]()
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
    return body | {name: numbers}


def _long_numbers(raw: bytes) -> tuple[str, int, int] | None:
    """The field that seems to hold a long list of numbers, and where they begin and end."""
    for _, found in zip(range(_MOST_LISTS), _LONG_NUMBERS.finditer(raw), strict=False):
        begin = raw.index(b"[", found.start()) + 1
        named = _FIELD.search(raw, max(0, found.start() - 80), found.start())
        if named is None:
            continue
        end = raw.find(b"]", begin)
        if end < 0:
            return None  # each that follows would be looked for to the end
        if end - begin >= _WHOLE:
            return named[1].decode(), begin, end
    return None


def json_object(raw: bytes) -> dict[str, Any]:
    """A body as an object.

    Raises:
        BadRequest: it is none.
    """
    try:
        body = msgspec.json.decode(raw)
    except UNREADABLE as error:
        message = f"the body is no JSON: {error}"
        raise BadRequest("Malformed", message) from error
    if not isinstance(body, dict):
        message = f"the body must be a JSON object, not {type(body).__name__}"
        raise BadRequest("Malformed", message)
    return body
