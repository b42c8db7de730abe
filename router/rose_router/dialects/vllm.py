"""vLLM's ``POST /inference/v1/generate``: token ids in, token ids out, versions beside them."""

from __future__ import annotations

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
from rose_router.dialects.completions import logprobs_of, sampling_of
from rose_router.dialects.sglang import MOST_ANSWERS, Ask

# Sampling parameters that change what is sampled and have no counterpart in SGLang.
_REFUSED = ("bad_words", "allowed_token_ids", "structured_outputs", "prompt_logprobs", "features")


def read(body: Mapping[str, Any], headers: Mapping[str, str], new_rid: Callable[[], str]) -> Ask:
    """Read a request.

    Raises:
        InvalidTurn: something is wrong with it; names the field.
    """
    given = body.get("sampling_params") or {}
    if not isinstance(given, dict):
        message = f"sampling_params: expected an object, got {type(given).__name__}"
        raise InvalidTurn(message)
    for name in _REFUSED:
        if given.get(name) is not None or body.get(name) is not None:
            message = f"{name}: the router does not take it"
            raise InvalidTurn(message)
    prompt = token_ids(body.get("token_ids"), "token_ids")
    answers = whole_number(given, "n", 1, least=1, most=MOST_ANSWERS)
    if body.get("stream") and answers > 1:
        message = "stream: only for one answer; send one request for each"
        raise InvalidTurn(message)
    hints, sampling, passed = Hints(body, headers), sampling_of(given), logprobs_of(given)
    if body.get("cache_salt"):
        passed["extra_key"] = body["cache_salt"]
    rid, own = caller_rid(body.get("request_id"), new_rid)
    asked = ((f"{rid}_{answer}" if answers > 1 else rid, prompt) for answer in range(answers))
    # vLLM serves lower numbers first.
    turns = turns_of(asked, hints, sampling, passed, own_rid=own, priority=-priority(body))
    return Ask(turns, bool(body.get("stream")), listed=True)
