"""Calls that a request forces (``tool_choice: required``, or one by name), by a grammar.

The answer is then a JSON list of calls and nothing else. A turn under a grammar cannot move, so it
runs on dedicated engines, as any with ``response_format`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.requests.shown import shown

_ANYTHING = {"type": "object"}


def forced_by(body: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Names of the tools of which one must be called; ``None`` = none must.

    Raises:
        InvalidTurn: ``tool_choice`` is nothing that OpenAI's clients send, or names no tool.
    """
    asked = body.get("tool_choice")
    if asked in (None, "auto", "none"):
        return None
    names = tuple(_names(body.get("tools")))
    match asked:
        case "required":
            chosen = names
        case {"type": "function", "function": {"name": str(name)}}:
            chosen = tuple(one for one in names if one == name)
        case _:
            message = (
                "tool_choice: expected auto, none, required or {type: function, function: {name}}, "
                f"got {shown(asked)}"
            )
            raise InvalidTurn(message)
    if not chosen:
        message = f"tool_choice: {shown(asked)} must be called, and tools has no such function"
        raise InvalidTurn(message)
    if body.get("response_format"):
        message = "tool_choice: a forced call and a response_format exclude each other"
        raise InvalidTurn(message)
    return chosen


def schema_of(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of an answer that calls one of the tools, or several."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [function["name"]]},
                "parameters": function.get("parameters") or _ANYTHING,
            },
            "required": ["name", "parameters"],
        }
        for function in _functions(body.get("tools"))
        if function["name"] in names
    ]
    made: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if body.get("parallel_tool_calls") is False:
        made["maxItems"] = 1
    return made


def calls_of(text: str) -> list[dict[str, Any]]:
    """The calls of such an answer, in OpenAI's form; none where it was cut short."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    listed = found if isinstance(found, list) else []
    return [
        {
            "type": "function",
            "function": {
                "name": one["name"],
                "arguments": json.dumps(one.get("parameters", {}), ensure_ascii=False),
            },
        }
        for one in listed
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    ]


def _names(tools: object) -> list[str]:
    return [function["name"] for function in _functions(tools)]


def _functions(tools: object) -> list[dict[str, Any]]:
    found = tools if isinstance(tools, list) else []
    functions = [one.get("function") for one in found if isinstance(one, dict)]
    return [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
