"""What of a request survives a move to another engine in the middle of its answer.

The next leg's prompt is the old prompt plus the tokens held, so an engine sees the held tokens as
prompt. What counts *output* tokens or has matched part of them then starts from nothing. Read off
SGLang 0.5.23 (its penalties look at output tokens only; its seeded sampler is keyed by position):

| rule | parameters | how |
|---|---|---|
| carried | temperature, top_p, top_k, min_p, stop_token_ids, logit_bias, seed, ... | as they are |
| adjusted | max_new_tokens, min_new_tokens | less the tokens held |
| emulated | stop strings | looked for across the cut (``stops``), where there is a tokenizer |
| dedicated | penalties, stop patterns, grammars | never moved |
| split | n | n turns of their own |
| refused | beam_width, processors (they are code) | by name |
| unknown | | never sent: ``fields`` is the allow-list |

A parameter at its neutral value is as good as absent. A turn with a *dedicated* parameter, or one
that nobody emulates for it, runs on dedicated engines only; if its engine is lost after the first
token it ends with a typed abort.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.requests.shown import shown
from rose_core.rollouts.requests.stops import MOST_WINDOW

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's own default


class SpliceRule(StrEnum):
    """What happens to a parameter when a turn moves."""

    CARRIED = "carried"
    ADJUSTED = "adjusted"
    EMULATED = "emulated"
    DEDICATED = "dedicated"
    SPLIT = "split"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SpliceRow:
    """One line of the table.

    Attributes:
        neutral: values that ask for nothing.
        why: shown to the caller when the rule stands in its way.
    """

    rule: SpliceRule
    neutral: tuple[Any, ...] = (None,)
    why: str = ""


_COUNTS = "counts output tokens, and held tokens become prompt"
_MATCHES = "may match across the cut"
_UNSEEN = (
    f"{_MATCHES}, which only a router with --tokenizer sees, of up to {MOST_WINDOW - 1} tokens"
)
_GRAMMAR = "its grammar would start again at the cut"
_CARRIED = SpliceRow(SpliceRule.CARRIED)

SAMPLING: Mapping[str, SpliceRow] = {
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop_token_ids",
            "ignore_eos",
            "logit_bias",
            "sampling_seed",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "no_stop_trim",
            "stream_interval",
        ),
        _CARRIED,
    ),
    "max_new_tokens": SpliceRow(SpliceRule.ADJUSTED),
    "min_new_tokens": SpliceRow(SpliceRule.ADJUSTED),
    "frequency_penalty": SpliceRow(SpliceRule.DEDICATED, (None, 0), _COUNTS),
    "presence_penalty": SpliceRow(SpliceRule.DEDICATED, (None, 0), _COUNTS),
    "repetition_penalty": SpliceRow(SpliceRule.DEDICATED, (None, 1), _COUNTS),
    "stop": SpliceRow(SpliceRule.EMULATED, (None, "", []), _UNSEEN),
    "stop_regex": SpliceRow(SpliceRule.DEDICATED, (None, "", []), _MATCHES),
    "json_schema": SpliceRow(SpliceRule.DEDICATED, (None,), _GRAMMAR),
    "regex": SpliceRow(SpliceRule.DEDICATED, (None,), _GRAMMAR),
    "ebnf": SpliceRow(SpliceRule.DEDICATED, (None,), _GRAMMAR),
    "structural_tag": SpliceRow(SpliceRule.DEDICATED, (None,), _GRAMMAR),
    "watermark": SpliceRow(SpliceRule.DEDICATED, (None, {}), _COUNTS),
    "custom_params": SpliceRow(SpliceRule.CARRIED),  # never sent: ``fields``
    "n": SpliceRow(SpliceRule.SPLIT, (None, 1)),
    "beam_width": SpliceRow(
        SpliceRule.REFUSED, (None, 1), "beams cannot be streamed token by token"
    ),
}

_IDS_ONLY = "a turn is continued from its token ids"

# Fields of the request beside ``sampling_params``; others that ``fields`` admits are carried.
REQUEST: Mapping[str, SpliceRow] = {
    "custom_logit_processor": SpliceRow(SpliceRule.REFUSED, (None, "", []), "it is code"),
    "return_hidden_states": SpliceRow(
        SpliceRule.DEDICATED, (None, False), "held tokens become prompt"
    ),
    # The last leg's engine computed all tokens before it as prompt, and says of all of them.
    "return_routed_experts": _CARRIED,
    "session_params": SpliceRow(
        SpliceRule.REFUSED, (None, {}), "the session would live in one engine"
    ),
    "lora_path": SpliceRow(SpliceRule.REFUSED, (None, "", []), "adapters are not served"),
    "input_embeds": SpliceRow(SpliceRule.REFUSED, (None,), _IDS_ONLY),
    "image_data": SpliceRow(SpliceRule.REFUSED, (None, [], ""), _IDS_ONLY),
    "audio_data": SpliceRow(SpliceRule.REFUSED, (None, [], ""), _IDS_ONLY),
    "video_data": SpliceRow(SpliceRule.REFUSED, (None, [], ""), _IDS_ONLY),
    "background": SpliceRow(SpliceRule.REFUSED, (None, False), "a turn ends with its caller"),
}


# Those that stand in a move's way where they ask for something.
_PASSES = frozenset({SpliceRule.CARRIED, SpliceRule.ADJUSTED, SpliceRule.SPLIT})
_STAYING = {name: row for name, row in SAMPLING.items() if row.rule not in _PASSES}
_STAYING_BESIDE = {name: row for name, row in REQUEST.items() if row.rule not in _PASSES}


def dedicated_because(
    sampling: Mapping[str, Any], request: Mapping[str, Any], emulated: Container[str] = ()
) -> tuple[str, ...]:
    """Why the turn may run on dedicated engines only; empty when it may move.

    Args:
        sampling: the turn's sampling parameters; those not named above are ``fields``' to refuse.
        request: fields beside them.
        emulated: parameters that somebody stands in for after a move.

    Raises:
        InvalidTurn: a parameter is refused; the message names it.
    """
    if _STAYING.keys().isdisjoint(sampling) and _STAYING_BESIDE.keys().isdisjoint(request):
        return ()  # the usual case
    reasons = [
        _standing(name, sampling[name], row)
        for name, row in _STAYING.items()
        if name in sampling and name not in emulated
    ]
    reasons += [
        _standing(name, request[name], row)
        for name, row in _STAYING_BESIDE.items()
        if name in request
    ]
    return tuple(reason for reason in reasons if reason)


def _standing(name: str, value: object, row: SpliceRow) -> str:
    if value in row.neutral:
        return ""
    reason = f"{name}: {row.why}"
    if row.rule is SpliceRule.REFUSED:
        message = f"{reason}; the router does not take it"
        raise InvalidTurn(message)
    return reason


def remaining(sampling: Mapping[str, Any], held: int) -> dict[str, Any]:
    """The sampling parameters of the next leg.

    Args:
        sampling: the turn's own.
        held: output tokens the turn holds already.
    """
    result = dict(sampling)
    if not held and "n" not in result and result.get("max_new_tokens") is not None:
        return result  # the usual case: a first leg asks for what the turn does
    result.pop("n", None)
    result["max_new_tokens"] = max(0, most_tokens(sampling) - held)
    least = sampling.get("min_new_tokens")
    if least:
        result["min_new_tokens"] = max(0, least - held)
    return result


def most_tokens(sampling: Mapping[str, Any]) -> int:
    """The most output tokens a turn may have.

    Raises:
        InvalidTurn: ``max_new_tokens`` is no positive number.
    """
    value = sampling.get("max_new_tokens")
    if value is None:
        return DEFAULT_MAX_NEW_TOKENS
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = f"max_new_tokens: expected a whole number of at least 1, got {shown(value)}"
        raise InvalidTurn(message)
    return value
