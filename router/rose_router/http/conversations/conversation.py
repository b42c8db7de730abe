"""A conversation as callers write it (OpenAI's), made into what chat templates expect.

As SGLang does before its own templates, so that a conversation makes the same prompt here and
there:

| callers write | templates get |
|---|---|
| ``content`` in parts of text | one text, the parts apart by a space |
| no ``content``, as beside calls of tools | the empty text |
| ``tool_calls[].function.arguments`` as JSON in a text | the object; what is no object stays |
| parts that are no text | a refusal: a turn is continued from its token ids |
| a role that is none of ``ROLES`` | a refusal, as by SGLang |
| a tool's result for a call that nobody made | a refusal, as by OpenAI; without an id it stays |

Next step: ``tokenization.Tokenizer.chat``.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import msgspec

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.requests.shown import shown
from rose_core.unreadable import UNREADABLE

Message = dict[str, Any]

ROLES = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root"}
)
"""Those that SGLang 0.5.23 takes; a template makes nothing of others, or something else."""


def messages_of(given: object) -> list[Message]:
    """The messages of a request.

    Raises:
        InvalidTurn: they are no conversation, or hold something else than text; names the field.
    """
    if not isinstance(given, list) or not given:
        message = "messages: expected a list with at least one message (or token ids as input_ids)"
        raise InvalidTurn(message)
    made, called = list[Message](), set[str]()
    for index, one in enumerate(given):
        read = _message(one, f"messages[{index}]")
        called.update(call_ids(read))
        if read["role"] == "tool":
            _check_called(read.get("tool_call_id"), called, f"messages[{index}]")
        made.append(read)
    return made


def call_ids(message: Message) -> list[str]:
    """Ids of the calls that an answer makes; callers write what they like there."""
    calls = message.get("tool_calls") or ()
    ids = [one.get("id") for one in calls if isinstance(one, dict)]
    return [one for one in ids if isinstance(one, str)]


def _check_called(call: object, called: Container[str], field: str) -> None:
    if call is None or (isinstance(call, str) and call in called):
        return
    message = (
        f"{field}.tool_call_id: no call before it has the id {shown(call)}; messages with role "
        "'tool' must be a response to a preceding message with 'tool_calls'"
    )
    raise InvalidTurn(message)


def _message(given: object, field: str) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        message = f"{field}: expected an object with a role"
        raise InvalidTurn(message)
    role = given["role"].lower()  # as SGLang reads it
    if role not in ROLES:
        message = (
            f"{field}.role: expected one of {', '.join(sorted(ROLES))}, got {shown(given['role'])}"
        )
        raise InvalidTurn(message)
    made = {**given, "role": role, "content": _text_of(given.get("content"), f"{field}.content")}
    if given.get("tool_calls"):
        made["tool_calls"] = _calls(given["tool_calls"], f"{field}.tool_calls")
    return made


def _text_of(content: object, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"{field}: expected text or a list of parts of text"
        raise InvalidTurn(message)
    return " ".join(_part(one, f"{field}[{index}]") for index, one in enumerate(content))


def _part(part: object, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        message = (
            f"{field}: {shown(kind, 40)} is no text, and a turn is continued from its token ids"
        )
        raise InvalidTurn(message)
    return text


def _calls(given: object, field: str) -> list[Any]:
    if not isinstance(given, list):
        message = f"{field}: expected a list of calls"
        raise InvalidTurn(message)
    return [_call(one) for one in given]


def _call(given: object) -> object:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        return given
    arguments = function.get("arguments")
    return {**given, "function": {**function, "arguments": _arguments(arguments)}}


def _arguments(given: object) -> object:
    if not given:
        return {}
    if not isinstance(given, str):
        return given
    try:
        found: object = msgspec.json.decode(given)
    except UNREADABLE:
        return given  # what the model once wrote; the caller's history is not ours to mend
    return found if isinstance(found, dict) else given


def begun(messages: Sequence[Message], *, goes_on: bool) -> tuple[list[Message], str]:
    """The conversation, and the beginning of the answer that the caller has written already.

    Raises:
        InvalidTurn: the last message is to be continued and is no assistant's.
    """
    if not goes_on:
        return list(messages), ""
    last = messages[-1]
    if last["role"] != "assistant":
        message = "continue_final_message: the last message must be the assistant's"
        raise InvalidTurn(message)
    return list(messages[:-1]), str(last["content"])
