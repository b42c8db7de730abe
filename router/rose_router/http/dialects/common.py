"""Reading what callers send, carefully; every complaint names the field."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.trajectories.prospects import NO_HINT, Deadline, Hint
from rose_core.rollouts.versions import NO_PIN, Pin, read_pin
from rose_router.http.admission.bodies import MOST_HISTORY, too_long
from rose_router.http.tokenizer.tokenization import Tokenizer

# Header names of the trainers' session keys, first match wins.
SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key", "X-Rose-Session")
SESSION_OF_URL = "X-Rose-Session"
"""Which of them says what stands in a request's URL."""
SESSION_FIELDS = ("session_id", "routing_key")
# Where agents' harnesses put theirs, without having been told to; first match wins.
_HARNESS_HEADERS = ("session-id", "session_id", "X-Claude-Code-Session-Id", "conversation_id")
_METADATA = ("session_id", "trajectory_id", "conversation_id")
_ROSE_HEADERS = (
    *("X-Rose-Job", "X-Rose-Min-Version", "X-Rose-Exact-Version", "X-Rose-Run"),
    *("X-Rose-Expected-Tokens", "X-Rose-Group", "X-Rose-Deadline", "X-Rose-Turn"),
)
_ALL_HEADERS = frozenset(map(str.lower, (*SESSION_HEADERS, *_HARNESS_HEADERS, *_ROSE_HEADERS)))
_NO_HEADERS: Mapping[str, str] = {}
# A cache key may be the same for all of a harness's trajectories: one that has a UUID in it is not.
# ``user`` is never one: that is whom a harness serves.
_HEX = r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}"
_UUID = re.compile(_HEX, re.IGNORECASE)
# A UUID in ``metadata.user_id`` may be the user's, as Anthropic asks for. Claude Code's has the
# session's behind it: ``user_..._session_UUID``, or JSON with a ``session_id``.
_SESSION_UUID = re.compile(r"session(?:_id)?[^0-9a-z]{1,8}" + _HEX, re.IGNORECASE)

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

_MOST_NAME = 512  # characters
# What aiohttp makes of a header's bytes that are no UTF-8.
_NO_UTF8 = re.compile("[\ud800-\udfff]")

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
TokenId = Annotated[int, msgspec.Meta(ge=0, le=_MOST_ID)]
MOST_AT_ONCE = 1 << 15  # ids that are checked in one call: a millisecond


class _Prompt(msgspec.Struct, array_like=True):
    """Of one field: msgspec looks a plain type up anew at every use, and a struct only once."""

    ids: tuple[TokenId, ...]


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


def _phrase(kinds: list[str]) -> str:
    asked = [_KINDS.get(kind, kind) for kind in kinds if kind != "null" or len(kinds) == 1]
    return " or ".join(asked)


def _complaint(complaint: str, field: str) -> str:
    """What msgspec says of a field, the field first."""
    found = _PATH.search(complaint)
    path = found[1] if found is not None else ""
    named = f"{field}.{path}" if field and path and path[0] != "[" else field + path
    complaint = complaint[: found.start()] if found is not None else complaint
    complaint = _KIND.sub(lambda kinds: _phrase(kinds[1].split(" | ")), complaint)
    return f"{named}: {complaint[:1].lower()}{complaint[1:]}" if named else complaint


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
        if len(value) <= MOST_AT_ONCE:
            return msgspec.convert((value,), _Prompt).ids
        # In slices, between which a thread gives way.
        slices = (value[n : n + MOST_AT_ONCE] for n in range(0, len(value), MOST_AT_ONCE))
        made = [msgspec.convert((one,), _Prompt).ids for one in slices]
        return tuple(itertools.chain.from_iterable(made))
    except msgspec.ValidationError as error:
        message = f"{field}: every token id must be a whole number from 0 to {_MOST_ID}"
        raise InvalidTurn(message) from error


def highest_of(prompt: Sequence[int]) -> int:
    """The highest of many ids, in slices between which a thread gives way."""
    begins = range(0, len(prompt), MOST_AT_ONCE)
    return max([max(prompt[begin : begin + MOST_AT_ONCE]) for begin in begins])


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


def has_hints(headers: Mapping[str, str]) -> bool:
    """Whether headers tell the router something of a turn; a client's are the same every time."""
    return _has_ours(tuple(headers))


@functools.lru_cache(1024)
def _has_ours(names: tuple[str, ...]) -> bool:
    return not _ALL_HEADERS.isdisjoint(map(str.lower, names))


class Hints:
    """What a caller may tell the router beside the turn: session, pins, expected length.

    Args:
        body: of the request.
        headers: beside it.
        asked: what was read of the body already, where its dialect's struct is one.

    Attributes:
        session: key of the trajectory, or empty.
        session_by: the field or header that says it.
        record: whether the conversation's tokens are kept for training rows.
        job: whose turn it is, or empty.
        pin: versions the turn may be sampled by.
        expected: output tokens expected, 0 = no idea.
        trajectory: group, deadline and number of the turn.
    """

    job: str
    pin: Pin
    expected: int
    trajectory: Hint

    def __init__(
        self, body: Mapping[str, Any], headers: Mapping[str, str], asked: Hinted | None = None
    ) -> None:
        asked = asked or read_as(body, Hinted)
        rose = asked.rose or _NO_ROSE
        if not has_hints(headers):
            headers = _NO_HEADERS  # as most trainers send: one look instead of eighteen
        else:
            _refuse_bytes(headers)
        self.session, self.session_by = _session(rose, asked, headers)
        self.record = rose.record is not False
        if rose is _NO_ROSE and not headers:
            self.job, self.pin, self.expected, self.trajectory = "", NO_PIN, 0, NO_HINT
            return
        self.job = rose.job or _header(headers, "X-Rose-Job")
        self.pin = read_pin(
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


def _refuse_bytes(headers: Mapping[str, str]) -> None:
    """A name that is no text can be written to nobody: it would break whoever lists the turns."""
    for name, value in headers.items():
        if name.lower() in _ALL_HEADERS and _NO_UTF8.search(value):
            raise InvalidTurn(f"{name}: expected text in UTF-8, got {value!r:.40}")


def _session(rose: Rose, asked: Hinted, headers: Mapping[str, str]) -> tuple[str, str]:
    """The session's key, and what says it; two empty texts where nothing does."""
    if rose.session:
        return rose.session, "rose.session"
    for name in SESSION_HEADERS if headers else ():
        if name in headers and (key := _header(headers, name)):
            return key, name
    if asked.session_id or asked.routing_key:
        name = "session_id" if asked.session_id else "routing_key"
        return asked.session_id or asked.routing_key or "", name
    if headers or asked.metadata or asked.prompt_cache_key or asked.conversation_id:
        for name, value in _of_harness(asked, headers):
            if value:
                return _key(value, name), name
    return "", ""  # as every trainer's request


def _of_harness(asked: Hinted, headers: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Where a harness may have put a key."""
    yield from [(name, headers[name]) for name in _HARNESS_HEADERS if name in headers]
    more = asked.metadata if isinstance(asked.metadata, dict) else {}
    yield from ((f"metadata.{name}", more.get(name)) for name in _METADATA)
    perhaps = (
        ("prompt_cache_key", asked.prompt_cache_key, _UUID),
        ("conversation_id", asked.conversation_id, _UUID),
        ("metadata.user_id", more.get("user_id"), _SESSION_UUID),
    )
    yield from ((name, value) for name, value, key in perhaps if value and key.search(str(value)))


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
