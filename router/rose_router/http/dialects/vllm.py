"""vLLM's ``POST /inference/v1/generate``: token ids in, token ids out, versions beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rose_router.http.dialects import openai
from rose_router.http.dialects.common import Count, Hints, Rank, Rid, Whole, read_as, token_ids
from rose_router.http.dialects.terms import Answers, ParsedRequest, PromptTerms, streamed
from rose_router.http.tokenizer.tokenization import Tokenizer

_DEFAULT_TOKENS = 16
"""Where nobody has said how long an answer may become: ``SamplingParams``' own default in vLLM."""


class VllmSampling(msgspec.Struct):
    """What of ``sampling_params`` is read here; the rest is ``openai``'s."""

    n: Answers | None = None
    max_tokens: Count | None = None
    logprobs: bool | Whole | None = None


class InferenceRequest(msgspec.Struct):
    """A request."""

    token_ids: object = None
    sampling_params: VllmSampling | None = None
    stream: bool | None = None
    request_id: Rid | None = None
    priority: Rank | None = None


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
    request = read_as(body, InferenceRequest)
    sampling, given = request.sampling_params or VllmSampling(), body.get("sampling_params") or {}
    openai.refuse(given, body)
    prompt = token_ids(request.token_ids, "token_ids")
    answers = sampling.n or 1
    rid = request.request_id or new_rid()
    asked = ((f"{rid}_{answer}" if answers > 1 else rid, prompt) for answer in range(answers))
    most = sampling.max_tokens or openai.to_the_end(prompt, context, _DEFAULT_TOKENS)
    terms = PromptTerms(
        Hints(body, headers),
        openai.unknown_of(given) | openai.sampling_of(given, most),
        openai.passed_of(body) | openai.logprobs_of(sampling.logprobs),
        priority=-(request.priority or 0),  # vLLM serves lower numbers first
        tokenizer=tokenizer,
    )
    return ParsedRequest(
        terms.turns(asked, own_rid=request.request_id is not None),
        streamed(request.stream, answers),
        listed=True,
    )
