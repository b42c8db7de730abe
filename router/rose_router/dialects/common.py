"""Reading what callers send, carefully; every complaint names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from rose_core.rollouts import splice
from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.versions import Pin, read_pin
from rose_router.errors import BadRequest
from rose_router.text import Tokenizer

# Header names of the trainers' session keys, first match wins.
SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key", "X-Rose-Session")
SESSION_FIELDS = ("session_id", "routing_key")

_MOST_ID = 2**31


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object a caller sent.

    Raises:
        BadRequest: it is none.
    """
    raw = await request.read()
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the body is no JSON: {error}"
        raise BadRequest("Malformed", message) from error
    if not isinstance(body, dict):
        message = f"the body must be a JSON object, not {type(body).__name__}"
        raise BadRequest("Malformed", message)
    return body


def token_ids(value: object, field: str) -> tuple[int, ...]:
    """A prompt as token ids.

    Raises:
        InvalidTurn: it is empty or holds something else.
    """
    if not isinstance(value, list) or not value:
        message = f"{field}: expected a list of token ids with at least one entry"
        raise InvalidTurn(message)
    if any(type(t) is not int for t in value) or min(value) < 0 or max(value) >= _MOST_ID:
        message = f"{field}: every token id must be a whole number from 0 to 2147483647"
        raise InvalidTurn(message)
    return tuple(value)


def encoded(text: str, tokenizer: Tokenizer | None, field: str, instead: str) -> tuple[int, ...]:
    """A prompt given as text.

    Raises:
        InvalidTurn: this router has no tokenizer.
    """
    if tokenizer is None:
        message = f"{field}: this router has no tokenizer; send token ids as {instead}"
        raise InvalidTurn(message)
    return token_ids(tokenizer.encode(text), field)


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


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Refuse what would go wrong only when the turn is continued.

    Raises:
        InvalidTurn: ``max_new_tokens`` or ``min_new_tokens`` is no fitting number.
    """
    whole_number(sampling, "min_new_tokens", 0, most=splice.most_tokens(sampling))


class Hints:
    """What a caller may tell the router beside the turn: session, pins, expected length.

    Attributes:
        session: key of the trajectory, or empty.
        pin: versions the turn may be sampled by.
        expected: output tokens expected, 0 = no idea.
    """

    def __init__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        rose = body.get("rose") or {}
        if not isinstance(rose, dict):
            message = "rose: expected an object with session, min_version, version, expected_tokens"
            raise InvalidTurn(message)
        self.session = _session(rose, body, headers)
        self.pin: Pin = read_pin(
            rose.get("min_version") or headers.get("X-Rose-Min-Version"),
            rose.get("version") or headers.get("X-Rose-Exact-Version"),
        )
        self.expected = _expected(rose, headers)


def _session(rose: Mapping[str, Any], body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    given = [rose.get("session")]
    given += [headers.get(name) for name in SESSION_HEADERS]
    given += [body.get(name) for name in SESSION_FIELDS]
    key = next((value for value in given if value), "")
    if not isinstance(key, str) or len(key) > 512:
        message = "session key: expected text of at most 512 characters"
        raise InvalidTurn(message)
    return key


def _expected(rose: Mapping[str, Any], headers: Mapping[str, str]) -> int:
    if rose.get("expected_tokens") is not None:
        return whole_number(rose, "expected_tokens", 0)
    text = headers.get("X-Rose-Expected-Tokens", "0")
    if not text.isdecimal():
        message = f"X-Rose-Expected-Tokens: expected a whole number, got {text!r}"
        raise InvalidTurn(message)
    return int(text)


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
