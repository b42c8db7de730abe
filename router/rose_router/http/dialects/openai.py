"""Fields of OpenAI's and vLLM's requests in SGLang's words; nothing a caller asks for is forgotten.

| a field | goes |
|---|---|
| SGLang's sampling parameter of the same name | into ``sampling_params`` |
| another name of one (``seed``, ``min_tokens``, ``guided_json``, ...) | there, by SGLang's name |
| what would change the answer and has no counterpart | back: refused by name |
| the router's own, or without effect on an answer (``user``, ``metadata``, ...) | no further |
| SGLang's other fields | to the engine, if listed (``rose_core.rollouts.requests.fields``) |
| any other | back: refused by name |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.requests.splice import SAMPLING
from rose_router.http.dialects.common import SESSION_FIELDS, WITHOUT_EFFECT, read_as
from rose_router.http.tokenizer.tokenization import Tokenizer

_RENAMED: Mapping[str, str] = {
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
}
_SAME = SAMPLING.keys() - {"max_new_tokens", "min_new_tokens", "n"}
_TEXTS = frozenset({"json_schema", "structural_tag"})

# Asked for in a way that the router would have to ignore: better refused by name.
_REFUSED = frozenset(
    {"echo", "best_of", "suffix", "prompt_embeds", "prompt_logprobs", "features"}
    | {"bad_words", "allowed_token_ids", "structured_outputs", "guided_choice"}
    | {"use_beam_search", "truncate_prompt_tokens", "logits_processors", "modalities", "audio"}
)
# What asks for no more than every answer is.
_NEUTRAL: Mapping[str, object] = {"best_of": 1, "modalities": ["text"]}
# Read elsewhere in the router, or said about the request and not about its answer.
_OURS = frozenset(
    {"model", "prompt", "messages", "input_ids", "token_ids", "text", "sampling_params"}
    | {"stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "rid", "request_id"}
    | {"logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
    | {"add_special_tokens", "add_generation_prompt", "continue_final_message"}
    | {"chat_template_kwargs", "reasoning_effort", "tools", "tool_choice", "parallel_tool_calls"}
    | {"response_format", "cache_salt", "extra_key", "priority", "rose", *SESSION_FIELDS}
    | WITHOUT_EFFECT
)


def refuse(*bodies: Mapping[str, Any]) -> None:
    """Refuse what cannot be granted.

    Raises:
        InvalidTurn: something of it is asked for; names the field.
    """
    for body in bodies:
        for name in sorted(_REFUSED & body.keys()):
            if _asks(body[name]) and body[name] != _NEUTRAL.get(name):
                message = f"{name}: the router does not take it"
                raise InvalidTurn(message)


def _asks(value: object) -> bool:
    """Whether the field asks for anything; a count of 0 does (``prompt_logprobs``)."""
    return value is not False and value not in (None, "", [], {})


def sampling_of(
    body: Mapping[str, Any], most: int, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Sampling parameters of a request.

    Args:
        body: the request, or its ``sampling_params``.
        most: output tokens.
        tokenizer: knows what the model is sampled with where the request does not say.

    Raises:
        InvalidTurn: its format of answers is none.
    """
    names = {**{name: name for name in _SAME}, **_RENAMED}
    defaults = {} if tokenizer is None else tokenizer.sampling_defaults
    sampling: dict[str, Any] = (
        defaults
        | {theirs: body[name] for name, theirs in names.items() if body.get(name) is not None}
        | _grammar(body)
    )
    for name in _TEXTS & sampling.keys():
        if not isinstance(sampling[name], str):
            sampling[name] = json.dumps(sampling[name])
    sampling["max_new_tokens"] = most
    return sampling


def to_the_end(prompt: Sequence[int], context: int, otherwise: int) -> int:
    """Output tokens where a request names no number: all that there is room for, as in SGLang.

    Args:
        prompt: token ids.
        context: of prompt and answer together; 0 = unknown.
        otherwise: where it is unknown.
    """
    return max(1, context - len(prompt)) if context else otherwise


class _Text(msgspec.Struct, tag="text", tag_field="type"):
    """Any text."""


class _Json(msgspec.Struct, tag="json_object", tag_field="type"):
    """Any object."""


class _Schema(msgspec.Struct):
    """A schema, and its name."""

    schema: dict[str, Any]


class _JsonOf(msgspec.Struct, tag="json_schema", tag_field="type"):
    """An object of a schema."""

    json_schema: _Schema


class _Structural(msgspec.Struct, tag="structural_tag", tag_field="type"):
    """Parts of a text, each of a schema; the engine reads which."""


class _Formatted(msgspec.Struct):
    """What a request says of its answers' form."""

    response_format: _Text | _Json | _JsonOf | _Structural | None = None


def _grammar(body: Mapping[str, Any]) -> dict[str, Any]:
    """What ``response_format`` asks for.

    Raises:
        InvalidTurn: it is no such thing.
    """
    given = body.get("response_format")
    match read_as({"response_format": given or None}, _Formatted).response_format:
        case _Json():
            return {"json_schema": {"type": "object"}}
        case _JsonOf(json_schema=asked):
            return {"json_schema": asked.schema}
        case _Structural():
            return {"structural_tag": given}
    return {}


def passed_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields beside the sampling parameters, and the caller's part of the cache's key."""
    taken = _OURS | _REFUSED | _SAME | _RENAMED.keys()
    passed = {n: value for n, value in body.items() if n not in taken and value is not None}
    key = "".join(str(body[name]) for name in ("cache_salt", "extra_key") if body.get(name))
    return passed | ({"extra_key": key} if key else {})


def unknown_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of vLLM's ``sampling_params`` that nobody here knows, to be refused by name."""
    known = _OURS | _REFUSED | _SAME | _RENAMED.keys()
    return {name: value for name, value in sampling.items() if name not in known and _asks(value)}


def logprobs_of(asked: bool | int | None) -> dict[str, Any]:
    """What ``logprobs`` asks for, in SGLang's words."""
    if asked is None or asked is False:
        return {}
    return {"return_logprob": True, "top_logprobs_num": int(asked) if asked is not True else 0}


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None
