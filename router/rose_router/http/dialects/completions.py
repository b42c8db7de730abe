"""OpenAI's ``POST /v1/completions`` with token ids in and out.

``prompt`` is a list of token ids, a list of such lists, or text where the router has a tokenizer.
The ids of prompt and answer come back as vLLM and SGLang name them (``prompt_token_ids``,
``token_ids``, ``response_token_ids``); log-probs name tokens by
their text, or as ``token_id:N`` without a tokenizer or with ``return_tokens_as_token_ids``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rose_core.rollouts.errors import InvalidTurn
from rose_router.http.dialects import openai
from rose_router.http.dialects.common import (
    Hints,
    caller_rid,
    encoded,
    priority,
    token_ids,
    whole_number,
)
from rose_router.http.dialects.terms import MOST_ANSWERS, ParsedRequest, PromptTerms
from rose_router.http.tokenization import Tokenizer

_DEFAULT_TOKENS = 16  # OpenAI's


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
    prompts = _prompts(body, tokenizer)
    answers = whole_number(body, "n", 1, least=1)
    if len(prompts) * answers > MOST_ANSWERS:
        message = f"more than {MOST_ANSWERS} answers in one request; send several requests"
        raise InvalidTurn(message)
    several = len(prompts) * answers > 1
    stream = bool(body.get("stream"))
    rid, own = caller_rid(body.get("rid") or body.get("request_id"), new_rid)
    asked = (
        (f"{rid}_{index}_{answer}" if several else rid, prompt)
        for index, prompt in enumerate(prompts)
        for answer in range(answers)
    )
    terms = PromptTerms(
        Hints(body, headers),
        openai.sampling_of(body, _DEFAULT_TOKENS, tokenizer),
        openai.passed_of(body) | openai.logprobs_of(body),
        priority=priority(body),
        tokenizer=tokenizer,
    )
    turns = terms.turns(asked, own_rid=own)
    return ParsedRequest(turns, stream, listed=True, usage=openai.wants_usage(body))


def _prompts(body: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    prompt = body.get("prompt")
    special = body.get("add_special_tokens") is not False
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
