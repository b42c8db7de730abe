"""OpenAI's ``POST /v1/responses``, made into a chat.

| of the request | becomes |
|---|---|
| ``instructions``, messages of a developer or of the system at the beginning | the first message |
| ``reasoning``, ``message`` and calls in a row, as a model wrote them | one answer with its calls |
| ``function_call_output``, ``custom_tool_call_output`` | messages of the tool |
| tools of type ``function`` or ``custom`` | functions; a custom one takes one text, ``input`` |
| tools that run at the provider (``web_search``, ...) | not shown to the model; the reply says so |
| ``previous_response_id`` | the conversation of that response, with what is new behind it |
| background, stored conversations and prompts, images, files | refused by name |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.requests.shown import shown
from rose_router.http.conversations.conversation import Message, call_ids
from rose_router.http.dialects.common import ours, read_as, without_nulls

CUSTOM_INPUT = "input"
"""The argument in which a custom tool gets its text."""

_TEXTS = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text"})
_SYSTEM = frozenset({"system", "developer"})


class ToolDefinition(msgspec.Struct):
    """A tool, of whatever type."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Reasoning(msgspec.Struct):
    """How much to think."""

    effort: str | None = None


class TextFormat(msgspec.Struct):
    """The form of the words."""

    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request; units are tokens."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    text: TextFormat | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None
    # Without effect here: about the request, or what a lease does not do and no harness relies on.
    include: object = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: object = None
    truncation: object = None
    service_tier: object = None
    user: object = None
    safety_identifier: object = None
    prompt_cache_retention: object = None
    stream_options: object = None
    top_logprobs: object = None
    client_metadata: object = None
    # Ours.
    rose: dict[str, Any] | None = None
    rid: str | None = None
    session_id: str | None = None
    routing_key: str | None = None
    priority: int | None = None


@dataclass(frozen=True)
class ReadResponses:
    """A request, read.

    Attributes:
        asked: as it came.
        chat: what it is as a chat.
        history: its conversation without the request's own instructions.
        tools: as they came.
        custom: names of tools that take a text.
        not_shown: types of tools that nobody here runs.
    """

    asked: ResponsesRequest
    chat: dict[str, Any]
    history: list[Message]
    tools: list[Any]
    custom: frozenset[str]
    not_shown: tuple[str, ...]


def previous_of(body: Mapping[str, Any]) -> str:
    """The response that the request goes on from; empty = none."""
    given = body.get("previous_response_id")
    return given if isinstance(given, str) else ""


def read(body: Mapping[str, Any], before: Sequence[Message] = ()) -> ReadResponses:
    """Read a request.

    Args:
        body: of the request.
        before: the conversation it goes on from (``history``): instructions are each request's own.

    Raises:
        InvalidTurn: it is none; names the field.
    """
    asked = read_as(without_nulls(body), ResponsesRequest)
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else None
    history = [*before, *_messages(asked.input if items is None else items)]  # type: ignore[arg-type]
    _check_results(history)
    tools = asked.tools or []
    chat = {
        "messages": _with_instructions(asked.instructions, history),
        "max_tokens": asked.max_output_tokens,
        "stream": bool(asked.stream),
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "tools": [_tool(one) for one in tools if one.type in {"function", "custom"}] or None,
        "tool_choice": _choice(asked.tool_choice),
        "parallel_tool_calls": asked.parallel_tool_calls,
        "response_format": _format(asked.text),
        "reasoning_effort": asked.reasoning and asked.reasoning.effort,
        "metadata": asked.metadata,
        "prompt_cache_key": asked.prompt_cache_key,
        "model": asked.model,
    }
    return ReadResponses(
        asked,
        {name: value for name, value in chat.items() if value is not None} | ours(body),
        history,
        body.get("tools") or [],
        frozenset(one.name for one in tools if one.type == "custom"),
        tuple(sorted({one.type for one in tools} - {"function", "custom"})),
    )


def _check_results(history: Sequence[Message]) -> None:
    """Refuse a result without its call, and a call without its result, in OpenAI's words.

    Raises:
        InvalidTurn: there is one; names it.
    """
    missing: dict[str, None] = {}
    called: set[str] = set()
    for message in history:
        for call in call_ids(message):
            called.add(call)
            missing[call] = None
        if message["role"] == "tool":
            answered = message["tool_call_id"]
            if answered not in called:
                complaint = (
                    "input: No tool call found for function call output with call_id "
                    f"{shown(answered)}."
                )
                raise InvalidTurn(complaint)
            missing.pop(answered, None)
    if missing:
        complaint = f"input: No tool output found for function call {shown(next(iter(missing)))}."
        raise InvalidTurn(complaint)


def _with_instructions(instructions: str | None, messages: list[Message]) -> list[Message]:
    """What stands at the beginning for the system is one message: templates take no second one."""
    first = next((n for n, one in enumerate(messages) if one["role"] != "system"), len(messages))
    texts = [instructions or "", *(str(one["content"]) for one in messages[:first])]
    text = "\n\n".join(filter(None, texts))
    return [{"role": "system", "content": text}] * bool(text) + messages[first:]


def _messages(items: Iterable[Mapping[str, Any]]) -> Iterator[Message]:
    """Items as messages; what a model wrote in several is one answer."""
    answer: Message | None = None
    for index, item in enumerate(items):
        kind, where = _string(item.get("type", "message")), f"input[{index}]"
        part = _part_of_answer(kind, item, where)
        if part is not None:
            answer = part if answer is None else _joined(answer, part)
            continue
        if answer is not None:
            yield answer
            answer = None
        yield _other(kind, item, where)
    if answer is not None:
        yield answer


def _part_of_answer(kind: object, item: Mapping[str, Any], where: str) -> Message | None:
    match kind:
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thoughts = _text(parts, f"{where}.content", _TEXTS | {"summary_text"})
            return {"role": "assistant", "content": "", "reasoning_content": thoughts}
        case "function_call":
            return _call(item, item.get("arguments", ""), where)
        case "custom_tool_call":
            return _call(item, {CUSTOM_INPUT: item.get("input", "")}, where)
        case "message" if item.get("role") == "assistant":
            return {"role": "assistant", "content": _text(item.get("content"), f"{where}.content")}
    return None


def _joined(answer: Message, part: Message) -> Message:
    """An answer with a further part; thoughts after a call begin the next turn's, and stay."""
    made = {**answer, "content": "\n".join(filter(None, (answer["content"], part["content"])))}
    for name in ("reasoning_content", "tool_calls"):
        if part.get(name):
            made[name] = answer.get(name, part[name][:0]) + part[name]
    return made


def _call(item: Mapping[str, Any], arguments: object, where: str) -> Message:
    name, call = item.get("name"), item.get("call_id")
    if not isinstance(name, str) or not isinstance(call, str):
        message = f"{where}: a call has a name and a call_id"
        raise InvalidTurn(message)
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _other(kind: object, item: Mapping[str, Any], where: str) -> Message:
    if kind in {"function_call_output", "custom_tool_call_output"}:
        text = _text(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text}
    role = _string(item.get("role"))
    if kind != "message" or role not in _SYSTEM | {"user"}:
        message = f"{where}: {kind!r:.60} of role {role!r:.40} is nothing that can be answered here"
        raise InvalidTurn(message)
    text = _text(item.get("content"), f"{where}.content")
    return {"role": "system" if role in _SYSTEM else "user", "content": text}


def _string(value: object) -> str:
    """A type or a role; anything else than text is none that is known."""
    return value if isinstance(value, str) else shown(value, 60)


def _text(content: object, where: str, kinds: frozenset[str] = _TEXTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"{where}: expected text or a list of parts of text"
        raise InvalidTurn(message)
    texts = []
    for index, part in enumerate(content):
        kind = _string(part.get("type")) if isinstance(part, dict) else type(part).__name__
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            message = f"{where}[{index}]: {kind!r:.60} is no text; a turn is continued from tokens"
            raise InvalidTurn(message)
        texts.append(text)
    return "\n".join(texts)


def _tool(one: ToolDefinition) -> dict[str, Any]:
    parameters = one.parameters or {"type": "object", "properties": {}}
    if one.type == "custom":
        properties = {CUSTOM_INPUT: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [CUSTOM_INPUT]}
    function = {
        "name": one.name,
        "description": one.description or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _choice(asked: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(asked, dict) and _string(asked.get("type")) in {"function", "custom"}:
        return {"type": "function", "function": {"name": asked.get("name")}}
    match asked:
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            named = [one.get("name") for one in tools if isinstance(one, dict)]
            functions = [{"type": "function", "function": {"name": one}} for one in named]
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": functions},
            }
    return asked


def _format(text: TextFormat | None) -> dict[str, Any] | None:
    given = (text and text.format) or {"type": "text"}
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    message = f"text.format: expected type text, json_object or json_schema, got {shown(given)}"
    raise InvalidTurn(message)
