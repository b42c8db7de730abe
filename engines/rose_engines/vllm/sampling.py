"""A turn as the router sends it (SGLang's ``/generate``) in vLLM's words, or refused by name.

A turn may begin on an SGLang and go on here, so nothing is taken that the two engines would sample
or stop by differently, and nothing whose agreement nobody has shown:

| taken | as |
|---|---|
| ``temperature``, ``top_k``, ``top_p``, ``ignore_eos``, ``stop`` | the same |
| ``stop_token_ids`` | the same; not beside ``ignore_eos``, where SGLang passes over them |
| ``max_new_tokens`` | ``max_tokens`` |
| ``skip_special_tokens``, ``spaces_between_special_tokens``, ``stream_interval`` | the same |
| ``no_stop_trim`` | ``include_stop_str_in_output``: of the text only, never of the tokens |
| ``return_logprob``, ``top_logprobs_num`` | ``logprobs``: of the sampled token, of so many others |
| ``logprob_start_len`` 0, -1 | ``prompt_logprobs`` 0, none |

| refused (``rose_core.rollouts.requests.fields.NOT_IN_VLLM``, by which turns are placed) | why |
|---|---|
| ``temperature`` between 0 and 0.01 | vLLM takes 0.01, and says its log-probs |
| ``temperature`` above 2 | vLLM takes none |
| ``min_p`` | vLLM drops tokens before it takes log-probs, SGLang after: log-probs of others |
| ``sampling_seed`` | drawn from other generators: the same seed gives other tokens |
| ``repetition_penalty`` | SGLang's counts what was answered, vLLM's the prompt too |
| other penalties, ``min_new_tokens``, ``logit_bias``, grammars, patterns | not compared |
| masks, experts, hidden states, log-probs of chosen tokens or of a part of the prompt | not built |

It is tested without vLLM. Next step: ``turns`` sends it to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rose_core.rollouts.requests.fields import SOME_REFUSE
from rose_engines.errors import EngineRefused

# SGLang's own default.
_DEFAULT_TOKENS = 128
_BAD_REQUEST = 400

_TAKEN = frozenset({"temperature", "top_p", "ignore_eos", "stop", "stop_token_ids"})
_OF_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "stream_interval"})
_KNOWN = _TAKEN | _OF_TEXT | {"max_new_tokens", "top_k", "no_stop_trim"}
_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    **SOME_REFUSE,
    "n": lambda value: value != 1,
    "custom_params": bool,
}
"""Sampling parameters -> whether a value asks for what this engine refuses."""

_REQUEST_TAKEN = frozenset(
    {"rid", "input_ids", "sampling_params", "stream", "return_logprob", "logprob_start_len"}
    | {"extra_key", "top_logprobs_num"}
)


class VllmTurn(NamedTuple):
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


def read_turn(body: Mapping[str, Any]) -> VllmTurn:
    """A turn, from the body of ``/generate``.

    Raises:
        EngineRefused: names what is wrong with it, or what vLLM does otherwise than SGLang.
    """
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise _refused("input_ids: expected a list of at least one token id; text is not taken")
    for name in ("rid", "extra_key"):
        if not isinstance(body.get(name) or "", str):
            raise _refused(f"{name}: expected text; an engine of vLLM takes one turn at a time")
    given = body.get("sampling_params") or {}
    if not isinstance(given, Mapping):
        raise _refused("sampling_params: expected an object")
    for name, value in body.items():
        # What is off by default in SGLang asks for nothing where it is off here.
        if name not in _REQUEST_TAKEN and value not in (None, False, 0, "", []):
            raise _refused(f"{name}: an engine of vLLM does not do that")
    return VllmTurn(
        ids,
        _sampling(given) | _logprobs(body),
        str(body.get("rid") or ""),
        str(body.get("extra_key") or ""),
        bool(body.get("stream")),
    )


def _logprobs(body: Mapping[str, Any]) -> dict[str, int]:
    """Which log-probabilities are asked for."""
    if not body.get("return_logprob"):
        return {}
    start = body.get("logprob_start_len")
    if start not in (None, 0, -1):
        raise _refused(f"logprob_start_len: an engine of vLLM takes 0 or -1, got {start!r}")
    asked = {"logprobs": int(body.get("top_logprobs_num") or 0)}
    return asked | {"prompt_logprobs": 0} if start == 0 else asked


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"max_tokens": _DEFAULT_TOKENS}
    for name, value in given.items():
        if value is None:
            continue
        _check(name, value)
        if name == "max_new_tokens":
            chosen["max_tokens"] = value
        elif name == "top_k":
            chosen["top_k"] = max(int(value), 0)  # -1 and 0: all
        elif name == "no_stop_trim":
            chosen["include_stop_str_in_output"] = bool(value)
        elif name in _TAKEN or name in _OF_TEXT:
            chosen[name] = value
    if chosen.get("ignore_eos"):
        chosen.pop("stop_token_ids", None)
    if type(chosen["max_tokens"]) is not int or chosen["max_tokens"] < 1:
        message = f"max_new_tokens: expected at least 1, got {chosen['max_tokens']!r:.40}"
        raise _refused(message)
    return chosen


def _check(name: str, value: object) -> None:
    if name in _REFUSED:
        if _REFUSED[name](value):
            raise _refused(
                f"sampling_params.{name}: vLLM and SGLang do not mean the same by {value!r:.40}, "
                f"and a turn may move between them; leave it out, or take engineClass sglang"
            )
    elif name not in _KNOWN:
        raise _refused(f"sampling_params.{name}: an engine of vLLM knows no such parameter")


def _refused(message: str) -> EngineRefused:
    return EngineRefused(message, _BAD_REQUEST)
