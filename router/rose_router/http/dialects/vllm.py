"""vLLM's ``POST /inference/v1/generate``: token ids in, token ids out, versions beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rose_core.rollouts.errors import InvalidTurn
from rose_router.http.dialects import openai
from rose_router.http.dialects.common import Hints, caller_rid, priority, token_ids, whole_number
from rose_router.http.dialects.terms import MOST_ANSWERS, ParsedRequest, PromptTerms, streamed
from rose_router.http.tokenization import Tokenizer

_DEFAULT_TOKENS = 16
"""Where nobody has said how long an answer may become: ``SamplingParams``' own default in vLLM."""


def read(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    tokenizer: Tokenizer | None,
    new_rid: Callable[[], str],
    context: int = 0,
) -> ParsedRequest:
    """Read a request.

    Args:
        body: of the request.
        headers: of the request.
        tokenizer: for stop strings; None = there is none.
        new_rid: names turns that the caller has not named.
        context: tokens of prompt and answer that the lease's engines bear; 0 = unknown.

    Raises:
        InvalidTurn: something is wrong with it; names the field.
    """
    given = body.get("sampling_params") or {}
    if not isinstance(given, dict):
        message = f"sampling_params: expected an object, got {type(given).__name__}"
        raise InvalidTurn(message)
    openai.refuse(given, body)
    prompt = token_ids(body.get("token_ids"), "token_ids")
    answers = whole_number(given, "n", 1, least=1, most=MOST_ANSWERS)
    stream = streamed(body, several=answers > 1)
    rid, own = caller_rid(body.get("request_id"), new_rid)
    asked = ((f"{rid}_{answer}" if answers > 1 else rid, prompt) for answer in range(answers))
    most = openai.to_the_end(prompt, context, _DEFAULT_TOKENS)
    terms = PromptTerms(
        Hints(body, headers),
        openai.unknown_of(given) | openai.sampling_of(given, most),
        openai.passed_of(body) | openai.logprobs_of(given),
        priority=-priority(body),  # vLLM serves lower numbers first
        tokenizer=tokenizer,
    )
    return ParsedRequest(terms.turns(asked, own_rid=own), stream, listed=True)
