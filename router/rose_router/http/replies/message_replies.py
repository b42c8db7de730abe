"""Turns as Anthropic's ``/v1/messages`` would have answered them; versions beside the words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rose_core.rollouts.errors import PromptTooLong
from rose_router.http.conversations.conversation import Message
from rose_router.http.replies.model_output import Beside, ModelOutput, OutputReader, Part
from rose_router.http.replies.parts import cut_short
from rose_router.turns.turn import Turn

ERRORS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's words; ``api_error`` for any other status."""

Event = dict[str, Any]

_BLOCKS = {Part.THOUGHTS: "thinking", Part.TEXT: "text"}


def error_json(status: int, message: str, reason: str) -> dict[str, Any]:
    """An error as its clients expect it."""
    kind = ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "reason": reason}}


def too_long_words(error: PromptTooLong) -> str:
    """What Anthropic says of such a prompt, by which its clients know that they must condense."""
    return f"prompt is too long: {error.tokens} tokens > {error.context - 1} maximum"


class MessageReplies:
    """The answer of one turn.

    Args:
        model: name to show.
        turn: the turn.
        reader: of its output.
        beside: what stands beside the answer.
    """

    def __init__(self, model: str, turn: Turn, reader: OutputReader, beside: Beside) -> None:
        self._model, self._turn, self._reader, self._beside = model, turn, reader, beside

    def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            RouterError: the turn was cut short; its status says whether asking again is right.
        """
        if (lost := cut_short(self._turn)) is not None:
            raise lost
        output = self._reader.read()
        return {
            **self._head(list(_blocks(output))),
            **_end(self._turn, output),
            "usage": self._usage(),
            **self._beside(),
        }

    def message(self) -> Message:
        """The answer as its caller will send it back."""
        output = self._reader.read()
        return replace(output, calls=tuple(map(_read_back, output.calls))).message()

    def events(self) -> Iterator[list[Event]]:
        """Pieces as they come; calls of tools whole, at the end."""
        turn = self._turn
        yield [
            {"type": "message_start", "message": self._head([]) | self._unfinished()},
            {"type": "ping"},
        ]
        index, over = -1, False
        while not over:
            over = turn.is_over
            events: list[Event] = []
            for piece in self._reader.pieces():
                name = _BLOCKS[piece.part]
                if piece.begins:
                    events += _stop(index)
                    index += 1
                    events.append(_start(index, _empty(name)))
                delta = {"type": f"{name}_delta", name: piece.text}
                events.append({"type": "content_block_delta", "index": index, "delta": delta})
            if over:
                events += self._last(index)
            yield events

    def _last(self, index: int) -> Iterator[Event]:
        turn, output = self._turn, self._reader.read()
        yield from _stop(index)
        if (lost := cut_short(turn)) is not None:
            yield error_json(lost.status, str(lost), lost.reason)
            return
        for block in _calls(output):
            index += 1
            yield _start(index, {**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield from _stop(index)
        yield {
            "type": "message_delta",
            "delta": _end(turn, output),
            "usage": self._usage(),
            **self._beside(),
        }
        yield {"type": "message_stop"}

    def _head(self, content: Sequence[Event]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._turn.request.rid}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _unfinished(self) -> dict[str, Any]:
        usage = {**self._usage(), "output_tokens": 0}
        return {"stop_reason": None, "stop_sequence": None, "usage": usage}

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": len(self._turn.request.prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": self._turn.held,
        }


def _blocks(output: ModelOutput) -> Iterator[Event]:
    if output.thoughts:
        yield {**_empty("thinking"), "thinking": output.thoughts}
    if output.text:
        yield {**_empty("text"), "text": output.text}
    yield from _calls(output)


def _empty(name: str) -> Event:
    made: Event = {"type": name, name: ""}
    return made | ({"signature": ""} if name == "thinking" else {})


def _calls(output: ModelOutput) -> Iterator[Event]:
    for call in output.calls:
        function = call["function"]
        arguments = _input(function["arguments"])
        identity = f"toolu_{call['id']}"
        yield {"type": "tool_use", "id": identity, "name": function["name"], "input": arguments}


def _input(arguments: str) -> dict[str, Any]:
    """What a tool gets; a model's mistake is told as a value, for its harness to see."""
    found = json.loads(arguments)
    return found if isinstance(found, dict) else {"value": found}


def _read_back(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _input(function["arguments"])}}


def _start(index: int, block: Event) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _stop(index: int) -> list[Event]:
    return [{"type": "content_block_stop", "index": index}] if index >= 0 else []


def _end(turn: Turn, output: ModelOutput) -> dict[str, Any]:
    finish = turn.finish or {}
    matched = finish.get("matched")
    if finish.get("type") == "length":
        reason = "max_tokens"
    elif output.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if isinstance(matched, str) else "end_turn"
    return {
        "stop_reason": reason,
        "stop_sequence": matched if reason == "stop_sequence" else None,
    }
