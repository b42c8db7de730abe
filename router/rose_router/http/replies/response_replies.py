"""Turns as OpenAI's ``/v1/responses`` would have answered them; versions beside the words.

A stream tells the items one after the other: thoughts, words as they come, calls whole at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from rose_core.rollouts.errors import PromptTooLong
from rose_router.http.conversations.conversation import Message
from rose_router.http.dialects.responses import CUSTOM_INPUT, ReadResponses
from rose_router.http.replies.model_output import Beside, ModelOutput, OutputReader, Part, Piece
from rose_router.http.replies.parts import cut_short
from rose_router.turns.turn import Turn

Event = dict[str, Any]

# OpenAI's names of the two, and what beside their text its clients look for.
_TEXTS: Mapping[Part, tuple[str, Event]] = {
    Part.THOUGHTS: ("reasoning_text", {}),
    Part.TEXT: ("output_text", {"logprobs": []}),
}


ERRORS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""OpenAI's words; ``server_error`` from 500 on, ``invalid_request_error`` for any other status."""


def error_json(status: int, message: str, reason: str) -> Event:
    """An error as its clients expect it; ``code`` is the router's closed word."""
    kind = ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": reason}}


CONTEXT_EXCEEDED = "context_length_exceeded"
"""OpenAI's code of a prompt that leaves no room for an answer, by which clients know it."""


def too_long_words(error: PromptTooLong) -> str:
    """What OpenAI says of such an input."""
    return f"Your input exceeds the context window of this model. {error}"


def too_long_events(
    model: str, read: ReadResponses, identity: str, error: PromptTooLong
) -> list[Event]:
    """A stream that ends before it has begun: OpenAI answers 200 there, and clients look in it.

    Args:
        model: name to show.
        read: the request.
        identity: of the response.
        error: why.
    """
    begun = _response_json(model, read, identity, "in_progress", created=int(time.time()))
    words = too_long_words(error)
    failed = {**begun, "status": "failed"}
    failed["error"] = {"code": CONTEXT_EXCEEDED, "message": words}
    told = error_json(400, words, CONTEXT_EXCEEDED)
    return [
        {"type": "response.created", "sequence_number": 0, "response": begun},
        {"type": "response.in_progress", "sequence_number": 1, "response": begun},
        {"type": "error", "sequence_number": 2, **told},
        {"type": "response.failed", "sequence_number": 3, "response": failed},
    ]


class ResponseReplies:
    """The answer of one turn.

    Args:
        model: name to show.
        read: the request.
        identity: of the response.
        turn: the turn.
        reader: of its output.
        beside: what stands beside the answer.
    """

    def __init__(
        self,
        model: str,
        read: ReadResponses,
        identity: str,
        turn: Turn,
        *,
        reader: OutputReader,
        beside: Beside,
    ) -> None:
        self._model, self._read, self._identity = model, read, identity
        self._turn, self._reader, self._beside = turn, reader, beside
        self._created = int(time.time())
        self._number = 0

    def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            RouterError: the turn was cut short; its status says whether asking again is right.
        """
        if (lost := cut_short(self._turn)) is not None:
            raise lost
        return self._ended(self._items(self._reader.read()))

    def message(self) -> Message:
        """The answer as its caller will send it back."""
        output = self._reader.read()
        return replace(output, calls=tuple(map(self._read_back, output.calls))).message()

    def _read_back(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        if function["name"] not in self._read.custom:
            return call
        arguments = {CUSTOM_INPUT: _custom_text(function["arguments"])}
        return {**call, "function": {**function, "arguments": arguments}}

    def events(self) -> Iterator[list[Event]]:
        """Pieces as they come."""
        turn = self._turn
        begun = self._response("in_progress", [])
        yield [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]
        place, part = -1, None
        over = False
        while not over:
            over = turn.is_over
            events: list[Event] = []
            for piece in self._reader.pieces():
                if piece.begins:
                    events += self._closed(place, part)
                    place, part = place + 1, piece.part
                    events += self._opened(place, part)
                events.append(self._delta(place, piece))
            if over:
                events += self._closed(place, part)
                events += self._last(place)
            yield events

    def _last(self, place: int) -> Iterator[Event]:
        output = self._reader.read()
        if (lost := cut_short(self._turn)) is not None:
            # Clients ask again after a server's error, and not after the other.
            code = "server_error" if lost.status >= 500 else "invalid_prompt"
            error = {"code": code, "message": str(lost)}
            failed = self._response("failed", self._items(output)) | {"error": error}
            yield self._event("response.failed", response=failed)
            return
        for item in self._calls(output):
            place += 1
            named = {"item_id": item["id"], "output_index": place}
            custom = item["type"] == "custom_tool_call"
            field = "input" if custom else "arguments"
            part_name = "custom_tool_call_input" if custom else "function_call_arguments"
            empty = {**item, field: "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=place, item=empty)
            yield self._event(f"response.{part_name}.delta", **named, delta=item[field])
            yield self._event(f"response.{part_name}.done", **named, **{field: item[field]})
            yield self._event("response.output_item.done", output_index=place, item=item)
        ended = self._ended(self._items(output))
        yield self._event(f"response.{ended['status']}", response=ended)

    def _opened(self, place: int, part: Part) -> Iterator[Event]:
        item = self._item(part, "", "in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=place, item=item)
        where = self._where(place, part)
        yield self._event("response.content_part.added", **where, part=_part(part, ""))

    def _delta(self, place: int, piece: Piece) -> Event:
        kind, more = _TEXTS[piece.part]
        where = self._where(place, piece.part)
        return self._event(f"response.{kind}.delta", **where, delta=piece.text, **more)

    def _closed(self, place: int, part: Part | None) -> Iterator[Event]:
        if part is None:
            return
        output = self._reader.read()
        text = output.thoughts if part is Part.THOUGHTS else output.text
        where, (kind, more) = self._where(place, part), _TEXTS[part]
        yield self._event(f"response.{kind}.done", **where, text=text, **more)
        yield self._event("response.content_part.done", **where, part=_part(part, text))
        item = self._item(part, text, self._status())
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _where(self, place: int, part: Part) -> dict[str, Any]:
        return {"item_id": self._item_id(part), "output_index": place, "content_index": 0}

    def _item_id(self, part: Part) -> str:
        prefix = "rs" if part is Part.THOUGHTS else "msg"
        return f"{prefix}_{self._turn.request.rid}"

    def _event(self, kind: str, **more: Any) -> Event:  # noqa: ANN401  # as OpenAI names it
        made = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return made

    def _items(self, output: ModelOutput) -> list[dict[str, Any]]:
        status = self._status()
        items = [self._item(Part.THOUGHTS, output.thoughts, status)] if output.thoughts else []
        if output.text or not (items or output.calls):
            items.append(self._item(Part.TEXT, output.text, status))
        return items + list(self._calls(output))

    def _item(self, part: Part, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "content": [_part(part, text)]}
        if part is Part.THOUGHTS:
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant", "status": status}

    def _calls(self, output: ModelOutput) -> Iterator[dict[str, Any]]:
        for call in output.calls:
            function: Mapping[str, Any] = call["function"]
            named = {"call_id": call["id"], "name": function["name"], "status": "completed"}
            if function["name"] in self._read.custom:
                named |= {"id": f"ctc_{call['id']}", "type": "custom_tool_call"}
                yield {**named, "input": _custom_text(function["arguments"])}
            else:
                named |= {"id": f"fc_{call['id']}", "type": "function_call"}
                yield {**named, "arguments": function["arguments"]}

    def _status(self) -> str:
        finish = self._turn.finish or {}
        return "incomplete" if finish.get("type") in {"length", "abort"} else "completed"

    def _ended(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        status = self._status()
        made = self._response(status, items)
        if status == "incomplete":
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        return made

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = len(self._turn.request.prompt), self._turn.held
        common = self._model, self._read, self._identity, status
        made = _response_json(*common, created=self._created, output=items, tokens=tokens)
        return made | self._beside()


def _response_json(
    model: str,
    read: ReadResponses,
    identity: str,
    status: str,
    *,
    created: int,
    output: Sequence[dict[str, Any]] = (),
    tokens: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    asked, (prompt, made) = read.asked, tokens
    reasoning = asked.reasoning.effort if asked.reasoning else None
    return {
        "id": identity,
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": reasoning, "summary": None},
        "store": asked.store is not False,
        "temperature": asked.temperature,
        "text": msgspec.to_builtins(asked.text) if asked.text else {"format": {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": read.tools,
        "top_p": asked.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + made,
        },
    }


def _part(part: Part, text: str) -> dict[str, Any]:
    kind, more = _TEXTS[part]
    return {"type": kind, "text": text} | ({"annotations": [], **more} if more else {})


def _custom_text(arguments: str) -> str:
    """The text of a custom tool's call; what the model wrote instead, where it gave none."""
    given = json.loads(arguments)
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
