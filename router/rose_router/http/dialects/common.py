"""Reading what callers send, carefully; every complaint names the field."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.fields import Bounds, check_context
from rose_core.rollouts.prospects import Deadline, Hint
from rose_core.rollouts.versions import Pin, read_pin
from rose_core.unreadable import UNREADABLE
from rose_router.errors import BadRequest, SlowCaller, TooLarge
from rose_router.http.loop_share import LoopShare
from rose_router.http.tokenization import Tokenizer

# Header names of the trainers' session keys, first match wins.
SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key", "X-Rose-Session")
SESSION_FIELDS = ("session_id", "routing_key")
# Where agents' harnesses put theirs, without having been told to; first match wins.
_HARNESS_HEADERS = ("session-id", "session_id", "X-Claude-Code-Session-Id", "conversation_id")
_METADATA = ("session_id", "trajectory_id", "conversation_id")
# A cache key or a user may be the same for all of a harness's trajectories: one that has a UUID in
# it is not. ``user`` is never one: that is whom a harness serves.
_UUID = re.compile(
    r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", re.IGNORECASE
)

# Said about a request and not about its answer: read here or nowhere, and never sent on.
WITHOUT_EFFECT = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "prediction", "verbosity"}
    | {"safety_identifier", "prompt_cache_key", "prompt_cache_retention", "conversation_id"}
    | {"log_metrics", "no_logs", "custom_labels", "return_cached_tokens_details"}
    | {"return_meta_info", "return_spec_tokens_details", "return_bytes", "received_time"}
    | {"external_trace_header", "separate_reasoning", "stream_reasoning"}
    # vLLM's and prime-rl's: where routed experts begin that were not asked for, what a cache does.
    | {"routed_experts_prompt_start", "routed_experts_start_len", "skip_reading_prefix_cache"}
    | {"flat_logprobs", "detokenize", "output_kind", "skip_clone", "kv_transfer_params"}
)

BODY_SECONDS = web.AppKey("body_seconds", float)

_MOST_NAME = 512  # characters

# What fields of requests may be; their complaints follow from that (``read_as``).
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Rank = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)]
Name = Annotated[str, msgspec.Meta(max_length=_MOST_NAME)]
Rid = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Rose(msgspec.Struct):
    """``rose``: what a caller may tell the router beside the turn."""

    session: Name | None = None
    group: Name | None = None
    job: Name | None = None
    turn: Whole | None = None
    run: Name | None = None
    min_version: object = None
    version: object = None
    deadline: object = None
    expected_tokens: Whole | None = None
    record: object = None


class Hinted(msgspec.Struct):
    """What of a request says whose turn it is, whatever the dialect."""

    rose: Rose | None = None
    session_id: Name | None = None
    routing_key: Name | None = None
    # Harnesses say other things here, too; what is no session's key is passed over.
    metadata: object = None
    prompt_cache_key: object = None
    conversation_id: object = None


_MOST_ID = 2**31 - 1
_MOST_AT_ONCE = 1 << 15  # ids that are checked in one call: a millisecond


class _Prompt(msgspec.Struct, array_like=True):
    """Of one field: msgspec looks a plain type up anew at every use, and a struct only once."""

    ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=_MOST_ID)], ...]


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
    found = _long_numbers(raw) if len(raw) > _WHOLE else None
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


Read = TypeVar("Read", bound=msgspec.Struct)


def read_as(body: object, kind: type[Read], field: str = "") -> Read:
    """What a caller sent as its dialect's struct; whatever else it holds is passed over.

    Args:
        body: an object; fields that are null count as the struct says.
        kind: what it is.
        field: the name of it in the request; empty = it is the request.

    Raises:
        InvalidTurn: it is none; names the field.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise InvalidTurn(_complaint(str(error), field)) from error


_PATH = re.compile(r" - at `\$?\.?(.*)`$")
_KIND = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_KINDS = {
    "object": "an object",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


def _in_words(kinds: list[str]) -> str:
    asked = [_KINDS.get(kind, kind) for kind in kinds if kind != "null" or len(kinds) == 1]
    return " or ".join(asked)


def _complaint(said: str, field: str) -> str:
    """What msgspec says of a field, the field first."""
    found = _PATH.search(said)
    path = found[1] if found is not None else ""
    named = f"{field}.{path}" if field and path and path[0] != "[" else field + path
    said = said[: found.start()] if found is not None else said
    said = _KIND.sub(lambda kinds: _in_words(kinds[1].split(" | ")), said)
    return f"{named}: {said[:1].lower()}{said[1:]}" if named else said


def ours(body: Mapping[str, Any]) -> dict[str, Any]:
    """What of a body is the router's own, whatever the dialect."""
    names = ("rose", "rid", "priority", *SESSION_FIELDS)
    return {name: body[name] for name in names if body.get(name) is not None}


_AS_WRITTEN = frozenset({"input_schema", "parameters", "schema", "arguments", "metadata"})


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same with fields that are null left out, as clients mean it; schemas stay as written."""
    return {
        name: value if name in _AS_WRITTEN else _cleaned(value)
        for name, value in body.items()
        if value is not None
    }


def _cleaned(value: object) -> object:
    if isinstance(value, dict):
        # A call's input belongs to its tool; a request's holds items.
        call = value.get("type") in ("tool_use", "custom_tool_call")
        cleaned = without_nulls({k: v for k, v in value.items() if not (call and k == "input")})
        return cleaned | ({"input": value["input"]} if call and "input" in value else {})
    return [_cleaned(one) for one in value] if isinstance(value, list) else value


def token_ids(value: object, field: str) -> tuple[int, ...]:
    """A prompt as token ids.

    Raises:
        InvalidTurn: it is empty or holds something else.
    """
    if not isinstance(value, list) or not value:
        message = f"{field}: expected a list of token ids with at least one entry"
        raise InvalidTurn(message)
    try:
        # In slices, between which a thread gives way.
        slices = (value[n : n + _MOST_AT_ONCE] for n in range(0, len(value), _MOST_AT_ONCE))
        made = [msgspec.convert((one,), _Prompt).ids for one in slices]
        return made[0] if len(made) == 1 else tuple(itertools.chain.from_iterable(made))
    except msgspec.ValidationError as error:
        message = f"{field}: every token id must be a whole number from 0 to {_MOST_ID}"
        raise InvalidTurn(message) from error


def encoded(
    text: str, tokenizer: Tokenizer | None, field: str, instead: str, *, special: bool = True
) -> tuple[int, ...]:
    """A prompt given as text, by default with the special tokens the tokenizer adds by itself.

    Raises:
        InvalidTurn: this router has no tokenizer.
        TooLarge: the text is longer than any context.
    """
    if tokenizer is None:
        message = f"{field}: this router has no tokenizer; send token ids as {instead}"
        raise InvalidTurn(message)
    if len(text) > MOST_HISTORY:  # one whose length nobody said, or behind other fields
        raise too_long(len(text))
    return token_ids(tokenizer.encode(text, special=special), field)


class Hints:
    """What a caller may tell the router beside the turn: session, pins, expected length.

    Attributes:
        session: key of the trajectory, or empty.
        session_by: the field or header that says it.
        record: whether the conversation's tokens are kept for training rows.
        job: whose turn it is, or empty.
        pin: versions the turn may be sampled by.
        expected: output tokens expected, 0 = no idea.
        trajectory: group, deadline and number of the turn.
    """

    def __init__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        asked = read_as(body, Hinted)
        rose = asked.rose or _NO_ROSE
        self.session, self.session_by = _session(rose, asked, headers)
        self.record = rose.record is not False
        self.job = rose.job or _header(headers, "X-Rose-Job")
        self.pin: Pin = read_pin(
            rose.min_version or headers.get("X-Rose-Min-Version"),
            rose.version or headers.get("X-Rose-Exact-Version"),
            rose.run or _header(headers, "X-Rose-Run"),
        )
        self.expected = _count(rose.expected_tokens, headers, "X-Rose-Expected-Tokens")
        self.trajectory = Hint(
            group=rose.group or _header(headers, "X-Rose-Group"),
            deadline=deadline(rose.deadline or headers.get("X-Rose-Deadline")),
            turn=_count(rose.turn, headers, "X-Rose-Turn"),
        )


_NO_ROSE = Rose()


def _session(rose: Rose, asked: Hinted, headers: Mapping[str, str]) -> tuple[str, str]:
    """The session's key, and what says it; two empty texts where nothing does."""
    if rose.session:
        return rose.session, "rose.session"
    for name in SESSION_HEADERS:
        if name in headers and (key := _header(headers, name)):
            return key, name
    if asked.session_id or asked.routing_key:
        name = "session_id" if asked.session_id else "routing_key"
        return asked.session_id or asked.routing_key or "", name
    for name, value in _of_harness(asked, headers):
        if value:
            return _key(value, name), name
    return "", ""


def _of_harness(asked: Hinted, headers: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Where a harness may have put a key."""
    yield from [(name, headers[name]) for name in _HARNESS_HEADERS if name in headers]
    if not (asked.metadata or asked.prompt_cache_key or asked.conversation_id):
        return  # as every trainer's request
    more = asked.metadata if isinstance(asked.metadata, dict) else {}
    yield from ((f"metadata.{name}", more.get(name)) for name in _METADATA)
    perhaps = (
        ("prompt_cache_key", asked.prompt_cache_key),
        ("conversation_id", asked.conversation_id),
        ("metadata.user_id", more.get("user_id")),
    )
    yield from ((name, value) for name, value in perhaps if value and _UUID.search(str(value)))


def _key(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > _MOST_NAME:
        message = f"session key ({name}): expected text of at most {_MOST_NAME} characters"
        raise InvalidTurn(message)
    return value


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "")
    if len(value) > _MOST_NAME:
        message = f"{name}: expected text of at most {_MOST_NAME} characters"
        raise InvalidTurn(message)
    return value


def _count(given: int | None, headers: Mapping[str, str], header: str) -> int:
    if given is not None:
        return given
    text = headers.get(header, "0")
    if not text.isdecimal() or len(text) > 9:
        message = f"{header}: expected a whole number, got {text!r:.40}"
        raise InvalidTurn(message)
    return int(text)


def deadline(value: object) -> Deadline | None:
    """A deadline as callers write it: publishes (``3``), or seconds (``"120s"``).

    Raises:
        InvalidTurn: it is neither.
    """
    if value is None:
        return None
    text = str(value)
    if text.isdecimal() and len(text) <= 9 and not isinstance(value, bool):
        return Deadline(publishes=int(text))
    if text.endswith("s") and text[:-1].replace(".", "", 1).isdecimal() and len(text) <= 12:
        return Deadline(seconds=float(text[:-1]))
    message = f"deadline: expected publishes (3) or seconds (120s), got {text!r:.40}"
    raise InvalidTurn(message)
