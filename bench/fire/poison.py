"""Requests that ended engines before their fields and bounds were checked, and that must end none.

Each is sent to a lease on its own. It must be refused with a status that no client asks again
after, no engine's process may end, and an ordinary turn must be answered at once afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp

Body = dict[str, Any]

_FEW = {"max_new_tokens": 4}
_FAR = 100_000

_TALK: Body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4}
# Parameter, value, those beside it. In 32 bits each makes an infinity, a zero that divides, or a
# NaN, and a row of such probabilities is none that a token can be drawn from.
_WILD: tuple[tuple[str, object, Body], ...] = (
    ("logit_bias", {"5": 1e39}, {"top_p": 0.9}),
    ("logit_bias", {"5": -1e39}, {"top_p": 0.9}),
    ("logit_bias", {"5": 3e38}, {"top_p": 0.9, "temperature": 0.5}),
    ("logit_bias", {"5": 10**50}, {"top_p": 0.9}),
    ("repetition_penalty", 1e-38, {"top_p": 0.9}),
    ("repetition_penalty", 1e-46, {"top_p": 0.9}),
    ("temperature", 1e39, {"top_p": 0.9, "min_new_tokens": 2}),
    ("temperature", 10**400, {}),
    ("top_p", 1e-46, {}),
    ("top_p", 0, {}),
    ("min_p", 1e-46, {}),
    ("min_p", 2, {}),
    ("frequency_penalty", -1e39, {}),
    ("presence_penalty", 1e-46, {}),
)

POISON: dict[str, tuple[str, Body]] = {
    "an id beyond the vocabulary": ("/generate", {"input_ids": [5, _FAR]}),
    "the largest id there is": ("/generate", {"input_ids": [2**31 - 1]}),
    "one prompt of a batch": ("/generate", {"input_ids": [[5], [_FAR]]}),
    "a stop id beyond the vocabulary": (
        "/generate",
        {"sampling_params": {**_FEW, "min_new_tokens": 2, "stop_token_ids": [_FAR]}},
    ),
    "a bias beyond the vocabulary": (
        "/generate",
        {"sampling_params": {**_FEW, "logit_bias": {str(_FAR): 1.0}}},
    ),
    "log-probs of ids beyond the vocabulary": (
        "/generate",
        {"return_logprob": True, "token_ids_logprob": [_FAR]},
    ),
    "log-probs from before the prompt": (
        "/generate",
        {"return_logprob": True, "logprob_start_len": -5},
    ),
    "more alternatives than tokens": (
        "/generate",
        {"return_logprob": True, "top_logprobs_num": _FAR},
    ),
    "more alternatives than tokens, in OpenAI's words": (
        "/v1/completions",
        {"prompt": [5], "max_tokens": 4, "logprobs": _FAR},
    ),
    "embeddings in the prompt's place": ("/generate", {"positional_embed_overrides": {"a": 1}}),
    "a seed that is no number of 64 bits": (
        "/generate",
        {"sampling_params": {**_FEW, "sampling_seed": 2**70}},
    ),
    "a pattern that is none": ("/generate", {"sampling_params": {**_FEW, "stop_regex": "("}}),
    "a processor": ("/generate", {"custom_logit_processor": "gASV"}),
    "another engine's host": ("/generate", {"bootstrap_host": "10.0.0.1", "bootstrap_room": 1}),
    "vLLM's words": ("/inference/v1/generate", {"token_ids": [_FAR]}),
    **{
        f"{name} of {value}, {others}": (
            "/generate",
            {"sampling_params": {**_FEW, **others, name: value}},
        )
        for name, value, others in _WILD
    },
    "a bias without an end, in a chat": (
        "/v1/chat/completions",
        {"input_ids": [5], "max_tokens": 4, "top_p": 0.9, "logit_bias": {"5": 1e39}},
    ),
    "a bias without an end, in vLLM's words": (
        "/inference/v1/generate",
        {"token_ids": [5], "sampling_params": {"top_p": 0.9, "logit_bias": {"5": 1e39}}},
    ),
    "a penalty of nothing, in a chat": (
        "/v1/chat/completions",
        {**_TALK, "top_p": 0.9, "repetition_penalty": 1e-38},
    ),
    "a temperature without an end, in Anthropic's words": (
        "/v1/messages",
        {**_TALK, "temperature": 1e39, "top_p": 0.9},
    ),
    "no tokens at all, in Anthropic's words": ("/v1/messages", {**_TALK, "top_p": 1e-46}),
    "a temperature without an end, in OpenAI's responses": (
        "/v1/responses",
        {"input": "go", "temperature": 1e39, "top_p": 0.9},
    ),
    "no tokens at all, in OpenAI's responses": ("/v1/responses", {"input": "go", "top_p": 1e-46}),
}


def ordinary(path: str = "/generate") -> Body:
    """A turn that nothing is wrong with."""
    return {"input_ids": [5, 6, 7], "sampling_params": dict(_FEW)} if path == "/generate" else {}


async def poisoned(
    http: aiohttp.ClientSession, url: str, secret: str, ended: Callable[[], list[str]]
) -> list[str]:
    """Send each; complaints about what came of it.

    Args:
        http: for the requests.
        url: the lease's.
        secret: its callers' bearer token.
        ended: names of engines whose process is gone.
    """
    headers = {"Authorization": f"Bearer {secret}"}
    wrong = []
    for name, (path, body) in POISON.items():
        async with http.post(url + path, json=ordinary(path) | body, headers=headers) as reply:
            if not 400 <= reply.status < 500 or reply.status in {408, 409, 429}:
                wrong.append(f"{name}: {reply.status} {(await reply.text())[:200]}")
        async with http.post(url + "/generate", json=ordinary(), headers=headers) as reply:
            if reply.status != 200:
                wrong.append(f"after {name}: {reply.status} {(await reply.text())[:200]}")
        if dead := ended():
            wrong.append(f"{name} ended {', '.join(dead)}")
            break
    return wrong
