"""Reading what callers send, carefully; every complaint names the field."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.prospects import Deadline, Hint
from rose_core.rollouts.versions import Pin, read_pin
from rose_core.unreadable import UNREADABLE
from rose_router.errors import BadRequest, SlowCaller, TooLarge
from rose_router.http.tokenization import Tokenizer

# Header names of the trainers' session keys, first match wins.
SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key", "X-Rose-Session")
SESSION_FIELDS = ("session_id", "routing_key")
# Where agents' harnesses put theirs, without having been told to; first match wins.
_HARNESS_HEADERS = ("session-id", "session_id", "X-Claude-Code-Session-Id", "conversation_id")
_METADATA = ("session_id", "trajectory_id", "conversation_id")
_HARNESS_FIELDS = ("prompt_cache_key", "conversation_id")
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
HINTS = (
    "session",
    "group",
    "job",
    "turn",
    "min_version",
    "version",
    "deadline",
    "expected_tokens",
    "record",
)

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


async def raw_body(request: web.Request) -> bytes:
    """The bytes a caller sent; they are kept.

    Raises:
        TooLarge: it begins as a text that is too long for any context; the rest is not read.
    """
    kept: bytes | None = request.get(_ARRIVED)
    if kept is not None:
        return kept
    length = request.content_length
    if length is None or length <= MOST_HISTORY or request.path not in _IDS_OR_TEXT:
        return await request.read()
    pieces, size, looked = [], 0, False
    async for piece in request.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, size)
        if not looked and size >= _BEGINNING:
            looked = True
            if _begins_with_text(b"".join(pieces)[:_BEGINNING]):
                raise too_long(length)
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
            async with asyncio.timeout(request.app.get(BODY_SECONDS, 60.0)):
                raw = await raw_body(request)
    except TimeoutError:
        message = "the body did not come in time; send it faster, or in smaller requests"
        raise SlowCaller("SlowCaller", message) from None
    return await _in_slices(raw) or json_object(raw)


_WHOLE = 1 << 18
"""Bytes of a body that are decoded at once: ids take 9 ns a byte, so a loop is held for 2 ms."""
_SLICE = 1 << 16
_LONG_NUMBERS = re.compile(rb'":\s*\[\s*-?\d')
_FIELD = re.compile(rb'(?<=[{,])\s*"([A-Za-z_]+)$')
_MOST_LISTS = 256  # that are looked at before a body counts as usual
_numbers = msgspec.json.Decoder(list[int | float]).decode


async def _in_slices(raw: bytes) -> dict[str, Any] | None:
    """A body with one long list of numbers, decoded a slice at a time; ``None``: no such body.

    What is found between two quotes may be no field's name but stand in a text: it counts only if
    the rest, decoded without the numbers, has just that field of its own, once and empty. Anything
    unusual is left to ``json_object``.
    """
    found = _long_numbers(raw) if len(raw) > _WHOLE else None
    if found is None:
        return None
    name, begin, end = found
    place, numbers = begin, list[int | float]()
    try:
        while place < end:
            cut = end if end - place <= _SLICE else raw.find(b",", place + _SLICE, end)
            cut = end if cut < 0 else cut
            numbers += _numbers(b"[%b]" % raw[place:cut])
            place = cut + 1
            await asyncio.sleep(0)
        body = json_object(raw[:begin] + raw[end:])
    except (*UNREADABLE, BadRequest):
        return None
    if body.get(name) != [] or raw.count(b'"%b"' % name.encode()) != 1:
        return None
    return body | {name: numbers}


def _long_numbers(raw: bytes) -> tuple[str, int, int] | None:
    """The field that seems to hold a long list of numbers, and where they begin and end."""
    for _, found in zip(range(_MOST_LISTS), _LONG_NUMBERS.finditer(raw), strict=False):
        begin = raw.index(b"[", found.start()) + 1
        end = raw.find(b"]", begin)
        named = _FIELD.search(raw, max(0, found.start() - 80), found.start())
        if named is not None and end - begin >= _WHOLE:
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


def read_as(body: Mapping[str, Any], kind: type[Read]) -> Read:
    """A body as its dialect's struct; fields that are null count as left out.

    Raises:
        InvalidTurn: it is none; names the field.
    """
    try:
        return msgspec.convert(without_nulls(body), kind)
    except msgspec.ValidationError as error:
        raise InvalidTurn(str(error)) from error


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


def whole_number(
    body: Mapping[str, Any], field: str, default: int, least: int = 0, most: int = 2**31
) -> int:
    """A whole number of the body.

    Raises:
        InvalidTurn: it is something else, or outside the bounds.
    """
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        message = f"{field}: expected a whole number from {least} to {most}, got {value!r:.100}"
        raise InvalidTurn(message)
    return value


def priority(body: Mapping[str, Any]) -> int:
    """The caller's priority; higher waits shorter.

    Raises:
        InvalidTurn: it is no whole number.
    """
    return whole_number(body, "priority", 0, least=-(2**31))


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
        rose = body.get("rose") or {}
        if not isinstance(rose, dict):
            message = f"rose: expected an object with any of {', '.join(HINTS)}"
            raise InvalidTurn(message)
        self.session, self.session_by = _session(rose, body, headers)
        self.record = rose.get("record") is not False
        self.job = _text(rose.get("job") or headers.get("X-Rose-Job"), "rose.job")
        self.pin: Pin = read_pin(
            rose.get("min_version") or headers.get("X-Rose-Min-Version"),
            rose.get("version") or headers.get("X-Rose-Exact-Version"),
        )
        self.expected = _number(rose, headers, "expected_tokens", "X-Rose-Expected-Tokens")
        self.trajectory = Hint(
            group=_text(rose.get("group") or headers.get("X-Rose-Group"), "rose.group"),
            deadline=deadline(rose.get("deadline") or headers.get("X-Rose-Deadline")),
            turn=_number(rose, headers, "turn", "X-Rose-Turn"),
        )


def _session(
    rose: Mapping[str, Any], body: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[str, str]:
    """The session's key, and what says it; two empty texts where nothing does."""
    metadata = body.get("metadata")
    more = metadata if isinstance(metadata, dict) else {}
    given = [("rose.session", rose.get("session"))]
    given += [(name, headers.get(name)) for name in SESSION_HEADERS]
    given += [(name, body.get(name)) for name in SESSION_FIELDS]
    given += [(name, headers.get(name)) for name in _HARNESS_HEADERS]
    given += [(f"metadata.{name}", more.get(name)) for name in _METADATA]
    given += [
        (name, value)
        for name, value in (
            *((name, body.get(name)) for name in _HARNESS_FIELDS),
            ("metadata.user_id", more.get("user_id")),
        )
        if _UUID.search(str(value))
    ]
    name, value = next(((name, value) for name, value in given if value), ("", ""))
    return _text(value, f"session key ({name})"), name


def _text(value: object, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 512:
        message = f"{field}: expected text of at most 512 characters"
        raise InvalidTurn(message)
    return value


def _number(rose: Mapping[str, Any], headers: Mapping[str, str], field: str, header: str) -> int:
    if rose.get(field) is not None:
        return whole_number(rose, field, 0)
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


def caller_rid(value: object, new_rid: Callable[[], str]) -> tuple[str, bool]:
    """The caller's id, or one made up; and whether it is the caller's.

    Raises:
        InvalidTurn: it is no text of 1 to 256 characters.
    """
    if value is None:
        return new_rid(), False
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        message = "rid: expected text of 1 to 256 characters"
        raise InvalidTurn(message)
    return value, True
