"""Anthropic's ``POST /v1/messages``, made into a chat.

Read as its clients write it: fields that change nothing here (``cache_control``, beta features of
its own servers) are passed over, everything else is read or refused by name.

| of the request | becomes |
|---|---|
| ``system`` | the first message |
| ``tool_result`` blocks of a user's message | messages of the tool, before the user's words |
| ``tool_use`` blocks of an assistant's | its calls |
| ``thinking`` blocks | what the template gets as ``reasoning_content`` |
| ``thinking: {type}`` | ``enable_thinking`` of the template |
| tools of Anthropic's own types (``bash_20250124``, ...) | not shown; the reply says so |
| images, documents | refused: a turn is continued from token ids |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.requests.shown import shown
from rose_router.http.dialects.common import ours, read_as, without_nulls

# Claude Code puts one before its own instructions; it is another one in every request, and would
# make every prompt a new conversation.
_BILLING = "x-anthropic-billing-header:"


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    """Words."""

    text: str


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(msgspec.Struct, tag="tool_result", tag_field="type"):
    """What a call came to."""

    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    """What the model thought."""

    thinking: str = ""
    signature: str = ""


class RedactedBlock(msgspec.Struct, tag="redacted_thinking", tag_field="type"):
    """Thoughts that only their provider can read."""

    data: str = ""


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock


class Message(msgspec.Struct):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct):
    """A tool: the caller's own, or one that Anthropic's models know by its type."""

    name: str = ""
    description: str = ""
    input_schema: dict[str, Any] = {}
    type: str = "custom"


class ToolChoice(msgspec.Struct):
    """Whether the model may call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    """Whether the model is to think first."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(msgspec.Struct):
    """How to answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request; units are tokens."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    model: str = ""
    system: str | list[TextBlock] = ""
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[ToolDefinition] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    # About the request and not about its answer.
    service_tier: object = None
    cache_control: object = None
    context_management: object = None
    inference_geo: object = None
    container: None = None
    speed: object = None
    betas: object = None
    # Ours.
    rose: dict[str, Any] = {}
    rid: str | None = None
    session_id: str | None = None
    routing_key: str | None = None
    priority: int | None = None


class ReadMessages(msgspec.Struct, frozen=True):
    """A request, read.

    Attributes:
        chat: what it is as a chat.
        not_shown: types of tools that nobody here knows.
    """

    chat: dict[str, Any]
    not_shown: tuple[str, ...]


def read(body: Mapping[str, Any]) -> ReadMessages:
    """Read a request.

    Raises:
        InvalidTurn: it is none; names the field.
    """
    asked = read_as(without_nulls(body), MessagesRequest)
    _check_results(asked.messages)
    made: dict[str, Any] = {
        "messages": [
            *_system(asked),
            *(one for entry in asked.messages for one in _messages(entry)),
        ],
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences or None,
        "stream": asked.stream,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "tools": [_tool(one) for one in asked.tools if one.type == "custom"] or None,
        "tool_choice": _choice(asked.tool_choice),
        "parallel_tool_calls": _parallel(asked.tool_choice),
        "response_format": _format(asked),
        "metadata": asked.metadata,
        "model": asked.model,
        **_thinking(asked),
    }
    last = made["messages"][-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        made["continue_final_message"] = True  # its clients begin an answer so
    return ReadMessages(
        {name: value for name, value in made.items() if value is not None} | ours(body),
        tuple(sorted({one.type for one in asked.tools} - {"custom"})),
    )


def _system(asked: MessagesRequest) -> Iterator[dict[str, Any]]:
    blocks = [TextBlock(asked.system)] if isinstance(asked.system, str) else asked.system
    texts = [one.text for one in blocks if one.text and not one.text.startswith(_BILLING)]
    if texts:
        yield {"role": "system", "content": "\n".join(texts)}


def _check_results(messages: list[Message]) -> None:
    """Refuse a result without its call, and a call without its result, in Anthropic's words.

    Several messages of one side in a row are one: harnesses send results one by one.

    Raises:
        InvalidTurn: there is one; names it.
    """
    called: list[str] = []  # by the answers since the last message of the other side
    missing: list[str] = []
    after = -1  # the message that made them
    for index, entry in enumerate(messages):
        blocks = [] if isinstance(entry.content, str) else entry.content
        if entry.role == "assistant":
            if index - 1 != after:
                _check_none_missing(missing, after)
                called = []
            calls = [block.id for block in blocks if isinstance(block, ToolUseBlock)]
            called, missing, after = called + calls, missing + calls, index
        for place, block in enumerate(blocks):
            if not isinstance(block, ToolResultBlock) or entry.role == "assistant":
                continue
            if block.tool_use_id not in called:
                message = (
                    f"messages.{index}.content.{place}: unexpected `tool_use_id` found in "
                    f"`tool_result` blocks: {shown(block.tool_use_id)}. Each `tool_result` block "
                    "must have a corresponding `tool_use` block in the previous message."
                )
                raise InvalidTurn(message)
            missing = [one for one in missing if one != block.tool_use_id]
    _check_none_missing(missing, after)


def _check_none_missing(missing: list[str], index: int) -> None:
    if missing:
        message = (
            f"messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately "
            f"after: {shown(', '.join(missing))}. Each `tool_use` block must have a corresponding "
            "`tool_result` block in the next message."
        )
        raise InvalidTurn(message)


def _messages(entry: Message) -> Iterator[dict[str, Any]]:
    blocks: list[Block] = (
        [TextBlock(entry.content)] if isinstance(entry.content, str) else entry.content
    )
    if entry.role == "assistant":
        yield _answer(blocks)
        return
    texts: list[str] = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                yield {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _result(block),
                }
            case _:
                message = f"messages: a {entry.role}'s message holds {type(block).__name__}"
                raise InvalidTurn(message)
    if texts or not blocks:
        yield {"role": entry.role, "content": "\n".join(texts)}


def _answer(blocks: list[Block]) -> dict[str, Any]:
    texts, calls, thoughts = [], [], []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedBlock():
                message = "messages: redacted_thinking was not written by this model; leave it out"
                raise InvalidTurn(message)
            case _:
                message = "messages: an assistant's message holds a tool_result"
                raise InvalidTurn(message)
    made: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        made["tool_calls"] = calls
    if any(thoughts):
        made["reasoning_content"] = "\n".join(thoughts)
    return made


def _result(block: ToolResultBlock) -> str:
    if isinstance(block.content, str):
        return block.content
    return "\n".join(part.text for part in block.content)


def _tool(one: ToolDefinition) -> dict[str, Any]:
    if not one.name:
        raise InvalidTurn("tools: a tool has a name")
    function = {
        "name": one.name,
        "description": one.description,
        "parameters": one.input_schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _choice(asked: ToolChoice | None) -> str | dict[str, Any] | None:
    match asked:
        case None:
            return None
        case ToolChoice(type="any"):
            return "required"
        case ToolChoice(type="tool", name=name):
            return {"type": "function", "function": {"name": name}}
    return asked.type


def _parallel(asked: ToolChoice | None) -> bool | None:
    return False if asked is not None and asked.disable_parallel_tool_use else None


def _format(asked: MessagesRequest) -> dict[str, Any] | None:
    given = asked.output_format or (asked.output_config and asked.output_config.format)
    if not given:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        message = "output_config.format: expected type json_schema with a schema"
        raise InvalidTurn(message)
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def _thinking(asked: MessagesRequest) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if asked.thinking is not None:
        made["chat_template_kwargs"] = {"enable_thinking": asked.thinking.type != "disabled"}
    if asked.output_config is not None and asked.output_config.effort:
        made["reasoning_effort"] = asked.output_config.effort
    return made
