"""vLLM's ``POST /inference/v1/generate``: token ids in, token ids out, versions beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rose_core.rollouts import splice
from rose_core.rollouts.errors import InvalidTurn
from rose_router.dialects.common import (
    Hints,
    caller_rid,
    check_sampling,
    priority,
    token_ids,
    whole_number,
)
from rose_router.dialects.completions import logprobs_of, sampling_of
from rose_router.dialects.sglang import MOST_ANSWERS, Ask
from rose_router.request import TurnRequest

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
    check_sampling(sampling)
    because = splice.dedicated_because(sampling, passed)
    rid, own = caller_rid(body.get("request_id"), new_rid)
    turns = [
        TurnRequest(
            rid=f"{rid}_{answer}" if answers > 1 else rid,
            prompt=prompt,
            sampling=sampling,
            own_rid=own,
            passed=passed,
            session=hints.session,
            pin=hints.pin,
            expected=hints.expected,
            priority=-priority(body),  # vLLM serves lower numbers first
            dedicated_because=because,
        )
        for answer in range(answers)
    ]
    return Ask(turns, bool(body.get("stream")), listed=True)
