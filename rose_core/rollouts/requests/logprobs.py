"""Which distribution a turn's log-probs belong to, in words by which replies can be compared.

An engine says in every event whether it divided by the temperature (``SCALE``; ROSE's plugin makes
SGLang say it); the request says the rest. Read off SGLang 0.5.23: bias, penalties and grammars have
changed the logits by then, top-k, top-p and min-p have not, and temperature 0 counts as 1. ROSE's
plugin has vLLM do the same (``rose_engines.vllm.plugin``), so turns may move between the two.

| an engine says | its log-probs |
|---|---|
| ``temperature`` | ``log_softmax(logits / temperature)``; with top-k 1 ``unknown`` |
| ``original`` | ``log_softmax(logits)`` (``SGLANG_RETURN_ORIGINAL_LOGPROB``) |
| anything else, or nothing | ``unknown`` |

Legs whose engines differ are told apart token by token (``mixed``), never averaged into one word.
Next step: ``rose_router.http.replies.parts`` puts it into every reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from rose_core.rollouts.requests.splice import REQUEST, SAMPLING, SpliceRow

SCALE = "logprob_scale"
"""The field of an event's ``meta_info`` in which an engine says it."""

NONE = "none: no tokens"
UNKNOWN = "unknown"
_GREEDY = 1e-6
_UNFILTERED = "top-k, top-p and min-p"
# What has changed the logits before anything is made of them.
_CHANGING = frozenset(
    {"frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"}
    | {"json_schema", "regex", "ebnf", "structural_tag"}
)
_CHANGING_BESIDE = frozenset({"custom_logit_processor"})


class LogitScale(StrEnum):
    """What an engine divides its logits by."""

    TEMPERATURE = "temperature"
    ORIGINAL = "original"


_SCALES = frozenset(LogitScale)


class LogprobTerms(msgspec.Struct, frozen=True, gc=False):
    """What a request's own parameters make of its log-probs.

    Attributes:
        temperature: by which tokens are sampled; 1 for a greedy turn, as the engine has it.
        changes: parameters that have changed the logits.
        only_best: top-k is 1. SGLang leaves the temperature out where all turns of a batch are so.
    """

    temperature: float = 1.0
    changes: tuple[str, ...] = ()
    only_best: bool = False

    @lru_cache(maxsize=1024)  # noqa: B019  # asked for at every event; terms are few and small
    def formula(self, scale: str) -> str:
        """How an engine of that scale computes them."""
        if scale not in _SCALES:
            return UNKNOWN
        if self.temperature == 1:
            text = f"log_softmax(logits) before {_UNFILTERED}"
        elif scale == LogitScale.TEMPERATURE and self.only_best:
            return UNKNOWN
        elif scale == LogitScale.TEMPERATURE:
            text = f"log_softmax(logits / {self.temperature:g}) before {_UNFILTERED}"
        else:
            text = f"log_softmax(logits) before temperature {self.temperature:g}, {_UNFILTERED}"
        return f"{text}; logits after {', '.join(self.changes)}" if self.changes else text


def terms_of(sampling: Mapping[str, Any], request: Mapping[str, Any]) -> LogprobTerms:
    """The terms of a turn.

    Args:
        sampling: its sampling parameters.
        request: fields beside them.
    """
    given = sampling.get("temperature")
    known = isinstance(given, int | float) and given >= _GREEDY
    changes = ["logit_bias"] if sampling.get("logit_bias") else []
    if not (_CHANGING.isdisjoint(sampling) and _CHANGING_BESIDE.isdisjoint(request)):
        for given_of, named, rows in (
            (sampling, _CHANGING, SAMPLING),
            (request, _CHANGING_BESIDE, REQUEST),
        ):
            found = named & given_of.keys()
            changes += [one for one in found if _asks(given_of[one], rows[one])]
    temperature = float(given) if known and given is not None else 1.0
    return LogprobTerms(temperature, tuple(sorted(changes)), sampling.get("top_k") == 1)


def _asks(value: object, row: SpliceRow) -> bool:
    return bool(value) and value not in row.neutral


def semantics(legs: Sequence[tuple[int, str]], tokens: int, terms: LogprobTerms) -> str:
    """What the log-probs of a turn are.

    Args:
        legs: for every leg that gave tokens the turn's token it began at, and its ``SCALE``.
        tokens: of the turn.
        terms: the request's.
    """
    if len(legs) == 1:  # the usual case, asked in every event of every stream
        start, scale = legs[0]
        return terms.formula(scale) if tokens > start else NONE
    parts: list[tuple[int, str]] = []
    ends = (*(start for start, _ in legs[1:]), tokens)
    for (start, scale), end in zip(legs, ends, strict=False):
        text = terms.formula(scale)
        if end > start and (not parts or parts[-1][1] != text):
            parts.append((start, text))
    if len(parts) > 1:
        return "mixed: " + "; ".join(f"from token {start}: {text}" for start, text in parts)
    return parts[0][1] if parts else NONE
