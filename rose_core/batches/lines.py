"""Reads the lines of a batch's file, and says of each that is wrong where and why (pure).

A line is ``{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}``.
Nothing of a batch runs while one of its lines is wrong. Next step: ``schedule`` says which line
goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rose_core.unreadable import UNREADABLE

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MOST_LINES = 50_000
LONGEST_LINE = 8 << 20
"""Bytes; the router reads no longer conversation."""
_LONGEST_ID = 256
_MOST_PROBLEMS = 100
# After every other turn: what a trainer or an agent sends has 0 where it says nothing.
PRIORITY = -(2**31)


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line as it is written."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file.

    Attributes:
        code: a closed word.
        message: what was wrong, and what was expected.
        line: counted from 1; None = it is about no single line.
        param: the field.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class LineSpan:
    """A line that may run, and where it lies in its file."""

    number: int
    custom_id: str
    offset: int
    length: int


@dataclass
class Checked:
    """A file that was read; it may run if ``problems`` is empty."""

    places: list[LineSpan] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def check(raw_lines: Iterable[bytes], endpoint: str, models: frozenset[str]) -> Checked:
    """Read every line of a file.

    Args:
        raw_lines: with their ends, as they follow each other; of one that is longer than
            ``LONGEST_LINE``, its beginning is enough.
        endpoint: that all lines must name.
        models: that the lease has.
    """
    checked, offset = Checked(), 0
    seen: dict[str, int] = {}
    for number, raw in enumerate(raw_lines, 1):
        if raw.strip() or len(raw) > LONGEST_LINE:
            found = _checked(raw, number, endpoint, models)
            if isinstance(found, str):
                first = seen.setdefault(found, number)
                if first == number:
                    checked.places.append(LineSpan(number, found, offset, len(raw)))
                else:
                    text = f"custom_id {found!r} stands in line {first} already; give each its own"
                    checked.problems.append(
                        Problem("duplicate_custom_id", text, number, "custom_id")
                    )
            else:
                checked.problems.append(found)
        offset += len(raw)
        if len(checked.problems) >= _MOST_PROBLEMS:
            break
        if len(checked.places) > MOST_LINES:
            text = f"the file has more than {MOST_LINES} lines; send it as several batches"
            checked.problems.append(Problem("too_many_lines", text))
            break
    if not checked.places and not checked.problems:
        checked.problems.append(Problem("empty_file", "the file has no line"))
    return checked


def _checked(raw: bytes, number: int, endpoint: str, models: frozenset[str]) -> str | Problem:
    """The line's own id, or what is wrong with it."""
    if len(raw) > LONGEST_LINE:
        text = f"the line has more than {LONGEST_LINE} bytes; condense what it sends"
        return Problem("line_too_long", text, number)
    try:
        line = msgspec.json.decode(raw, type=BatchLine)
    except UNREADABLE as error:
        text = f'{error}; expected {{"custom_id", "method": "POST", "url", "body"}} as JSON'
        return Problem("invalid_json_line", text, number)
    wrong = _wrong(line, endpoint, models)
    if wrong is None:
        return line.custom_id
    code, text, param = wrong
    return Problem(code, text, number, param)


def _wrong(line: BatchLine, endpoint: str, models: frozenset[str]) -> tuple[str, str, str] | None:
    """Code, message and field of what is wrong with a line that can be read."""
    if not 0 < len(line.custom_id) <= _LONGEST_ID:
        text = f"custom_id: expected 1 to {_LONGEST_ID} characters, not {len(line.custom_id)}"
        return "invalid_custom_id", text, "custom_id"
    if line.url != endpoint:
        text = f"url {line.url!r:.100}: expected {endpoint}, the batch's own endpoint"
        return "mismatched_endpoint", text, "url"
    if line.body.get("stream"):
        text = "body.stream: an answer in a file cannot be streamed; leave it out"
        return "stream_in_batch", text, "body.stream"
    model = line.body.get("model")
    if not isinstance(model, str) or model not in models:
        text = f"body.model {model!r:.100} is none of {', '.join(sorted(models))}"
        return "model_not_found", text, "body.model"
    return None


def turn_of(raw: bytes, name: str) -> tuple[str, dict[str, Any]]:
    """The line's own id, and the body of the turn that it asks for.

    The turn's id is the line's: asked again while the first is live or just done, the router gives
    the same answer and computes nothing. Its priority and job are not the line's to choose.
    """
    line = msgspec.json.decode(raw, type=BatchLine)
    body = dict(line.body)
    for field_ in ("request_id", "stream", "stream_options"):
        body.pop(field_, None)
    rose = body.get("rose")
    if isinstance(rose, dict):
        body["rose"] = {key: value for key, value in rose.items() if key != "job"}
    return line.custom_id, body | {"rid": name, "priority": PRIORITY}
