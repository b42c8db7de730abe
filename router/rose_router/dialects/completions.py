"""OpenAI's ``POST /v1/completions`` with token ids in and out.

``prompt`` is a list of token ids, a list of such lists, or text where the router has a tokenizer.
The ids of prompt and answer come back as vLLM and SGLang name them (``prompt_token_ids``,
``token_ids``, ``response_token_ids``); log-probs name tokens as ``token_id:N``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rose_core.rollouts.errors import InvalidTurn
from rose_router.dialects.common import (
    Hints,
    caller_rid,
    encoded,
    priority,
    token_ids,
    turns_of,
    whole_number,
)
from rose_router.dialects.sglang import MOST_ANSWERS, Ask
from rose_router.text import Tokenizer

# OpenAI's (and vLLM's) name -> SGLang's sampling parameter.
_SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
    "logit_bias": "logit_bias",
    "seed": "sampling_seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "skip_special_tokens": "skip_special_tokens",
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf": "ebnf",
}
# Asked for in a way that the router would have to ignore: better refused by name.
_REFUSED = ("echo", "best_of", "suffix", "prompt_embeds")
# SGLang's own fields beside OpenAI's; they go to the engine as they are.
_PASSED = (
    "extra_key",
    "cache_salt",
    "lora_path",
    "custom_logit_processor",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "session_params",
)
_DEFAULT_TOKENS = 16  # OpenAI's


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
    for name in _REFUSED:
        if body.get(name):
            message = f"{name}: the router does not take it"
            raise InvalidTurn(message)
    prompts = _prompts(body.get("prompt"), tokenizer)
    answers = whole_number(body, "n", 1, least=1)
    if len(prompts) * answers > MOST_ANSWERS:
        message = f"more than {MOST_ANSWERS} answers in one request; send several requests"
        raise InvalidTurn(message)
    stream = bool(body.get("stream"))
    several = len(prompts) * answers > 1
    if stream and several:
        message = "stream: only for one prompt and one answer; send one request for each"
        raise InvalidTurn(message)
    hints, sampling, passed = Hints(body, headers), sampling_of(body), passed_of(body)
    passed |= logprobs_of(body)
    rid, own = caller_rid(body.get("rid") or body.get("request_id"), new_rid)
    asked = (
        (f"{rid}_{index}_{answer}" if several else rid, prompt)
        for index, prompt in enumerate(prompts)
        for answer in range(answers)
    )
    turns = turns_of(asked, hints, sampling, passed, own_rid=own, priority=priority(body))
    return Ask(turns, stream, listed=True)


def _prompts(prompt: object, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    if isinstance(prompt, str):
        return [encoded(prompt, tokenizer, "prompt", "prompt: [ids]")]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        return [token_ids(value, f"prompt[{i}]") for i, value in enumerate(prompt)]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        return [encoded(str(value), tokenizer, "prompt", "prompt: [[ids]]") for value in prompt]
    return [token_ids(prompt, "prompt")]


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's and vLLM's sampling fields as SGLang's.

    Raises:
        InvalidTurn: ``max_tokens`` is no whole number.
    """
    sampling = {
        theirs: body[name] for name, theirs in _SAMPLING.items() if body.get(name) is not None
    }
    sampling["max_new_tokens"] = whole_number(body, "max_tokens", _DEFAULT_TOKENS, least=1)
    return sampling


def passed_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the engine's own dialect has under the same name."""
    return {name: body[name] for name in _PASSED if body.get(name) is not None}


def logprobs_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """What ``logprobs`` asks for, in SGLang's words.

    Raises:
        InvalidTurn: it is neither true, false nor a whole number.
    """
    logprobs = body.get("logprobs")
    if logprobs is None or logprobs is False:
        return {}
    top = 0 if logprobs is True else whole_number(body, "logprobs", 0)
    return {"return_logprob": True, "top_logprobs_num": top}
