"""OpenAI's ``POST /v1/completions`` with token ids in and out.

``prompt`` is a list of token ids, a list of such lists, or text where the router has a tokenizer.
The ids of prompt and answer come back as vLLM and SGLang name them (``prompt_token_ids``,
``token_ids``, ``response_token_ids``); log-probs name tokens by
their text, or as ``token_id:N`` without a tokenizer or with ``return_tokens_as_token_ids``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rose_core.rollouts.errors import InvalidTurn
from rose_router.http.dialects import openai
from rose_router.http.dialects.common import (
    Count,
    Hints,
    Rank,
    Rid,
    Whole,
    encoded,
    read_as,
    token_ids,
)
from rose_router.http.dialects.terms import MOST_ANSWERS, Answers, ParsedRequest, PromptTerms
from rose_router.http.tokenizer.tokenization import Tokenizer

_DEFAULT_TOKENS = 16  # OpenAI's


class CompletionsRequest(msgspec.Struct):
    """What of a request is read here; sampling parameters are ``openai``'s."""

    prompt: object = None
    n: Answers | None = None
    stream: bool | None = None
    stream_options: openai.StreamOptions | None = None
    max_tokens: Count | None = None
    logprobs: bool | Whole | None = None
    add_special_tokens: bool | None = None
    rid: Rid | None = None
    request_id: Rid | None = None
    priority: Rank | None = None


def read(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    tokenizer: Tokenizer | None,
    new_rid: Callable[[], str],
) -> ParsedRequest:
    """Read a request.

    Raises:
        InvalidTurn: something is wrong with it; names the field.
    """
    openai.refuse(body)
    request = read_as(body, CompletionsRequest)
    prompts = _prompts(request, tokenizer)
    answers = request.n or 1
    if len(prompts) * answers > MOST_ANSWERS:
        message = f"more than {MOST_ANSWERS} answers in one request; send several requests"
        raise InvalidTurn(message)
    several = len(prompts) * answers > 1
    own = request.rid or request.request_id
    rid = own or new_rid()
    asked = (
        (f"{rid}_{index}_{answer}" if several else rid, prompt)
        for index, prompt in enumerate(prompts)
        for answer in range(answers)
    )
    terms = PromptTerms(
        Hints(body, headers),
        openai.sampling_of(body, request.max_tokens or _DEFAULT_TOKENS, tokenizer),
        openai.passed_of(body) | openai.logprobs_of(request.logprobs),
        priority=request.priority or 0,
        tokenizer=tokenizer,
    )
    options = request.stream_options
    return ParsedRequest(
        terms.turns(asked, own_rid=own is not None),
        bool(request.stream),
        listed=True,
        usage=options is not None and bool(options.include_usage),
    )


def _prompts(asked: CompletionsRequest, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    prompt = asked.prompt
    special = asked.add_special_tokens is not False
    if isinstance(prompt, str):
        return [encoded(prompt, tokenizer, "prompt", "prompt: [ids]", special=special)]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        return [token_ids(value, f"prompt[{i}]") for i, value in enumerate(prompt)]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        return [
            encoded(str(value), tokenizer, "prompt", "prompt: [[ids]]", special=special)
            for value in prompt
        ]
    return [token_ids(prompt, "prompt")]
