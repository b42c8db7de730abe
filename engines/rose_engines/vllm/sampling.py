"""A turn as the router sends it (SGLang's ``/generate``) in vLLM's words, or refused by name.

A turn may begin on an SGLang and go on here, so nothing is taken that the two engines would sample
or stop by differently, and nothing whose agreement nobody has shown:

| taken | as |
|---|---|
| ``temperature``, ``top_k``, ``top_p``, ``ignore_eos``, ``stop_token_ids``, ``stop`` | the same |
| ``max_new_tokens`` | ``max_tokens`` |
| ``skip_special_tokens``, ``spaces_between_special_tokens``, ``stream_interval`` | the same |
| ``no_stop_trim`` | ``include_stop_str_in_output``: of the text only, never of the tokens |
| ``return_logprob``, ``top_logprobs_num`` | ``logprobs``: of the sampled token, of so many others |
| ``logprob_start_len`` 0, -1 | ``prompt_logprobs`` 0, none |

Standard library only: it is tested without vLLM. Next step: ``turns`` sends it to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rose_engines.errors import EngineRefused

# SGLang's own default.
_DEFAULT_TOKENS = 128
_BAD_REQUEST = 400

_TAKEN = frozenset({"temperature", "top_p", "ignore_eos", "stop", "stop_token_ids"})
_OF_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "stream_interval"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # It leaves other tokens: vLLM drops them before it takes log-probs, SGLang after.
    "min_p": (0,),
    # Drawn from other generators: the same seed gives other tokens.
    "sampling_seed": (),
    # Not compared with SGLang's.
    "min_new_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    # SGLang's counts what was answered, vLLM's the prompt too.
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "n": (1,),
    **dict.fromkeys(("stop_regex", "json_schema", "regex", "ebnf", "structural_tag"), ("", [])),
    "watermark": ({},),
    "custom_params": ({},),
}
"""Sampling parameters that only pass with a value that asks for nothing."""

_REQUEST_TAKEN = frozenset(
    {"rid", "input_ids", "sampling_params", "stream", "return_logprob", "logprob_start_len"}
    | {"extra_key", "top_logprobs_num"}
)


class Asked(NamedTuple):
    """A turn for vLLM.

    Attributes:
        ids: the prompt.
        sampling: keywords of vLLM's ``SamplingParams``.
        rid: the caller's name of it, empty = none.
        key: keeps its prefix cache apart from others.
        stream: event by event.
    """

    ids: list[int]
    sampling: dict[str, Any]
    rid: str
    key: str
    stream: bool


def read_turn(body: Mapping[str, Any]) -> Asked:
    """A turn, from the body of ``/generate``.

    Raises:
        EngineRefused: names what is wrong with it, or what vLLM does otherwise than SGLang.
    """
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise _refused("input_ids: expected a list of at least one token id; text is not taken")
    given = body.get("sampling_params") or {}
    if not isinstance(given, Mapping):
        raise _refused("sampling_params: expected an object")
    for name, value in body.items():
        # What is off by default in SGLang asks for nothing where it is off here.
        if name not in _REQUEST_TAKEN and value not in (None, False, 0, "", []):
            raise _refused(f"{name}: an engine of vLLM does not do that")
    sampling = _sampling(given)
    if body.get("return_logprob"):
        sampling["logprobs"] = int(body.get("top_logprobs_num") or 0)
        start = body.get("logprob_start_len")
        if start not in (None, 0, -1):
            raise _refused(f"logprob_start_len: an engine of vLLM takes 0 or -1, got {start!r}")
        if start == 0:
            sampling["prompt_logprobs"] = 0
    return Asked(
        ids,
        sampling,
        str(body.get("rid") or ""),
        str(body.get("extra_key") or ""),
        bool(body.get("stream")),
    )


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"max_tokens": _DEFAULT_TOKENS}
    for name, value in given.items():
        if value is None:
            continue
        if name == "max_new_tokens":
            chosen["max_tokens"] = value
        elif name == "top_k":
            chosen["top_k"] = max(int(value), 0)  # -1 and 0: all
        elif name == "no_stop_trim":
            chosen["include_stop_str_in_output"] = bool(value)
        elif name in _TAKEN or name in _OF_TEXT:
            chosen[name] = value
        elif name not in _NEUTRAL:
            raise _refused(f"sampling_params.{name}: an engine of vLLM knows no such parameter")
        elif value not in _NEUTRAL[name]:
            raise _refused(
                f"sampling_params.{name}: vLLM and SGLang do not mean the same by it, and a turn "
                f"may move between them; leave it out, or take engineClass sglang"
            )
    if type(chosen["max_tokens"]) is not int or chosen["max_tokens"] < 1:
        message = f"max_new_tokens: expected at least 1, got {chosen['max_tokens']!r:.40}"
        raise _refused(message)
    return chosen


def _refused(message: str) -> EngineRefused:
    return EngineRefused(message, _BAD_REQUEST)
