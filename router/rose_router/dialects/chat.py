"""OpenAI's ``POST /v1/chat/completions``, with token ids beside the words.

The prompt is what the model's own chat template makes of ``messages`` and ``tools``, or the token
ids in ``input_ids`` where the caller keeps them itself (then nothing is ever tokenized twice). The
answer's ids, log-probs and versions come back as in ``/v1/completions``. Calls of tools written as
``<tool_call>{...}</tool_call>`` (Qwen, Hermes) are read when the request names tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rose_core.rollouts.errors import InvalidTurn
from rose_router.dialects.common import (
    Hints,
    caller_rid,
    priority,
    token_ids,
    turns_of,
    whole_number,
)
from rose_router.dialects.completions import passed_of, sampling_of
from rose_router.dialects.sglang import MOST_ANSWERS, Ask
from rose_router.text import Tokenizer

TOOL_BEGINS = "<tool_call>"
_TOOL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_DEFAULT_TOKENS = 2048


def read(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    tokenizer: Tokenizer | None,
    new_rid: Callable[[], str],
) -> Ask:
    """Read a request.

    Raises:
        InvalidTurn: something is wrong with it; names the field.
    """
    answers = whole_number(body, "n", 1, least=1, most=MOST_ANSWERS)
    stream = bool(body.get("stream"))
    if stream and answers > 1:
        message = "stream: only for one answer; send one request for each"
        raise InvalidTurn(message)
    prompt = prompt_of(body, tokenizer)
    hints, sampling, passed = Hints(body, headers), _sampling(body), _passed(body)
    rid, own = caller_rid(body.get("rid") or body.get("request_id"), new_rid)
    asked = ((f"{rid}_{answer}" if answers > 1 else rid, prompt) for answer in range(answers))
    turns = turns_of(asked, hints, sampling, passed, own_rid=own, priority=priority(body))
    return Ask(turns, stream, listed=True)


def prompt_of(body: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The prompt of a conversation.

    Raises:
        InvalidTurn: it is malformed, or there is no tokenizer.
    """
    if body.get("input_ids") is not None:
        return token_ids(body["input_ids"], "input_ids")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        message = "messages: expected a list with at least one message (or token ids as input_ids)"
        raise InvalidTurn(message)
    if tokenizer is None:
        message = "messages: this router has no tokenizer; send token ids as input_ids"
        raise InvalidTurn(message)
    more = body.get("chat_template_kwargs") or {}
    tools = body.get("tools") or []
    if not isinstance(more, dict) or not isinstance(tools, list):
        message = "tools must be a list and chat_template_kwargs an object"
        raise InvalidTurn(message)
    return token_ids(tokenizer.chat(messages, tools, more), "messages")


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    most = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_TOKENS
    asked = body.get("response_format") or {}
    if not isinstance(asked, dict) or not isinstance(asked.get("json_schema", {}), dict):
        message = "response_format: expected an object"
        raise InvalidTurn(message)
    schema = asked.get("json_schema", {}).get("schema")
    if asked.get("type") == "json_object":
        schema = {"type": "object"}
    grammar = None if schema is None else json.dumps(schema)
    return sampling_of({**body, "max_tokens": most, "json_schema": grammar})


def _passed(body: Mapping[str, Any]) -> dict[str, Any]:
    if not body.get("logprobs"):
        return passed_of(body)
    return passed_of(body) | {
        "return_logprob": True,
        "top_logprobs_num": whole_number(body, "top_logprobs", 0, most=128),
    }


def message_of(text: str, body: Mapping[str, Any], rid: str) -> dict[str, Any]:
    """The assistant's message: words, and the calls of tools among them when tools were named."""
    if not body.get("tools") or body.get("tool_choice") == "none":
        return {"role": "assistant", "content": text}
    calls = [call for call in map(_call, _TOOL.findall(text)) if call]
    if not calls:
        return {"role": "assistant", "content": text}
    words = _TOOL.sub("", text).strip()
    named = [{"id": f"call_{rid}_{number}", **call} for number, call in enumerate(calls)]
    return {"role": "assistant", "content": words or None, "tool_calls": named}


def _call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None  # stays in the text, where the caller sees what the model wrote
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = json.dumps(found.get("arguments", {}), ensure_ascii=False)
    return {"type": "function", "function": {"name": found["name"], "arguments": arguments}}


def shown_words(text: str, body: Mapping[str, Any]) -> str:
    """What of a growing answer may be streamed as words: nothing that may become a tool's call."""
    if not body.get("tools"):
        return text
    cut = text.find(TOOL_BEGINS)
    if cut >= 0:
        return text[:cut].rstrip()
    begun = next((n for n in range(len(TOOL_BEGINS), 0, -1) if text.endswith(TOOL_BEGINS[:n])), 0)
    return text[: len(text) - begun].rstrip()
