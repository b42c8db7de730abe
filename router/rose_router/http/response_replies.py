"""Turns as OpenAI's ``/v1/responses`` would have answered them; versions beside the words.

A stream tells the items one after the other: thoughts, words as they come, calls whole at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from rose_router.http.conversation import Message
from rose_router.http.dialects.responses import CUSTOM_INPUT, ReadResponses
from rose_router.http.message_replies import aborted
from rose_router.http.model_output import ModelOutput, OutputReader
from rose_router.turns.turn import Turn, typed_abort

Event = dict[str, Any]
Beside = Callable[[], dict[str, Any]]


class ResponseReplies:
    """The answer of one turn.

    Args:
        model: name to show.
        read: the request.
        identity: of the response.
        turn: the turn.
        reader: of its output.
        beside: what only the router knows, as it stands now.
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
            TurnLost: the turn was cut short; asking again is right.
        """
        typed_abort(self._turn)
        if (self._turn.finish or {}).get("type") == "abort":
            raise aborted(self._turn)
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
        place, kind, told = -1, "", 0
        before = ModelOutput("", "")
        over = False
        while not over:
            over = turn.is_over
            typed_abort(turn)
            output = self._reader.read()
            said: list[Event] = []
            for name, text in (("reasoning", output.thoughts), ("message", output.words)):
                if not text or (name == "reasoning" and kind == "message"):
                    continue
                if kind != name:
                    if kind:
                        said += self._closed(place, kind, before)
                    place, kind, told = place + 1, name, 0
                    said += self._opened(place, name)
                if len(text) > told:
                    said.append(self._delta(place, name, text[told:]))
                    told = len(text)
            before = output
            if over:
                said += self._closed(place, kind, output) if kind else []
                said += self._last(output, place)
            yield said

    def _last(self, output: ModelOutput, place: int) -> Iterator[Event]:
        turn = self._turn
        if (turn.finish or {}).get("type") == "abort":
            lost = aborted(turn)
            error = {"code": "server_error", "message": str(lost)}
            failed = self._response("failed", self._items(output)) | {"error": error}
            yield self._event("response.failed", response=failed)
            return
        for item in self._calls(output):
            place += 1
            named = {"item_id": item["id"], "output_index": place}
            field, word = ("input", "custom_tool_call_input")
            if item["type"] == "function_call":
                field, word = "arguments", "function_call_arguments"
            empty = {**item, field: "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=place, item=empty)
            yield self._event(f"response.{word}.delta", **named, delta=item[field])
            yield self._event(f"response.{word}.done", **named, **{field: item[field]})
            yield self._event("response.output_item.done", output_index=place, item=item)
        ended = self._ended(self._items(output))
        yield self._event(f"response.{ended['status']}", response=ended)

    def _opened(self, place: int, kind: str) -> Iterator[Event]:
        item = self._thoughts("") if kind == "reasoning" else self._words("", "in_progress")
        item["content"] = []
        yield self._event("response.output_item.added", output_index=place, item=item)
        part = _part(kind, "")
        yield self._event("response.content_part.added", **self._where(place, kind), part=part)

    def _delta(self, place: int, kind: str, text: str) -> Event:
        more: Event = {"logprobs": []} if kind == "message" else {}
        return self._event(
            f"response.{_word(kind)}.delta", **self._where(place, kind), delta=text, **more
        )

    def _closed(self, place: int, kind: str, output: ModelOutput) -> Iterator[Event]:
        text = output.thoughts if kind == "reasoning" else output.words
        where = self._where(place, kind)
        more: Event = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{_word(kind)}.done", **where, text=text, **more)
        yield self._event("response.content_part.done", **where, part=_part(kind, text))
        item = self._thoughts(text) if kind == "reasoning" else self._words(text, self._status())
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _where(self, place: int, kind: str) -> dict[str, Any]:
        prefix = "rs" if kind == "reasoning" else "msg"
        identity = f"{prefix}_{self._turn.request.rid}"
        return {"item_id": identity, "output_index": place, "content_index": 0}

    def _event(self, kind: str, **more: Any) -> Event:  # noqa: ANN401  # as OpenAI names it
        made = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return made

    def _items(self, output: ModelOutput) -> list[dict[str, Any]]:
        items = [self._thoughts(output.thoughts)] if output.thoughts else []
        if output.words or not (items or output.calls):
            items.append(self._words(output.words, self._status()))
        return items + list(self._calls(output))

    def _thoughts(self, text: str) -> dict[str, Any]:
        return {
            "id": f"rs_{self._turn.request.rid}",
            "type": "reasoning",
            "summary": [],
            "content": [_part("reasoning", text)],
        }

    def _words(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": f"msg_{self._turn.request.rid}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part("message", text)],
        }

    def _calls(self, output: ModelOutput) -> Iterator[dict[str, Any]]:
        for call in output.calls:
            function: Mapping[str, Any] = call["function"]
            named = {"call_id": call["id"], "name": function["name"], "status": "completed"}
            if function["name"] in self._read.custom:
                text = _custom_text(function["arguments"])
                yield {
                    "id": f"ctc_{call['id']}",
                    "type": "custom_tool_call",
                    **named,
                    "input": text,
                }
            else:
                arguments = function["arguments"]
                yield {
                    "id": f"fc_{call['id']}",
                    "type": "function_call",
                    **named,
                    "arguments": arguments,
                }

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
        asked, turn = self._read.asked, self._turn
        prompt, made = len(turn.request.prompt), turn.held
        reasoning = asked.reasoning.effort if asked.reasoning else None
        return {
            "id": self._identity,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": reasoning, "summary": None},
            "store": asked.store is not False,
            "temperature": asked.temperature,
            "text": msgspec.to_builtins(asked.text) if asked.text else {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": self._read.tools,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + made,
            },
            **self._beside(),
        }


def _word(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _custom_text(arguments: str) -> str:
    """The text of a custom tool's call; what the model wrote instead, where it gave none."""
    given = json.loads(arguments)
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
