"""Which fields of a request may reach an engine, and within which bounds: an allow-list.

An engine takes whatever the router sends it. One token id beyond the vocabulary ends SGLang's
scheduler, and the router would carry the turn on to the next engine: one request could end all
engines of a lease. So nothing passes that is not named here, with a value that the engine is known
to bear. Read off SGLang 0.5.23, whose own checks cover the rest (``SamplingParams.verify``).

| what | where it ends an engine | bound |
|---|---|---|
| ids of prompt, stops, biases, log-probs | an index beyond a table | the vocabulary |
| ``top_logprobs_num`` | ``topk`` of more than there are | the vocabulary, ``MOST_TOP`` |
| ``logprob_start_len`` | an assertion of the scheduler | at least -1 |
| prompt | KV pages that do not exist | less than the context |
| a value of another type | wherever it is used first | the type |
| a number that the sampler computes with | a row of NaN, of which no token is drawn | its range |

Those ranges are SGLang's own where it has one. It has none for a bias, which it adds to a logit,
and checks in 64 bits what it computes in 32: what divides may be 0 there. A bias of 1e39 ended
engines on CPU; on a GPU the kernels may answer such a row with an id beyond the vocabulary.

Not every engine takes all of it: those that do not say which parameters they refuse, a turn asks
with some of them (``asked_with``), and it runs only where none of those is refused.

``splice`` says what of these survives a move. Next step: ``rose_router.http.dialects`` asks
``admitted`` as it reads a request; the router asks ``check_within`` as a turn comes and before a
leg begins, and ``check_taken`` while it waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from rose_core.rollouts.errors import InvalidTurn, PromptTooLong, UnsafeTurn
from rose_core.rollouts.requests.shown import shown
from rose_core.rollouts.requests.splice import REQUEST, SAMPLING, SpliceRow, SpliceRule

MOST_TOP = 4096
"""Log-probs of alternatives for a token: more is a table of the vocabulary, in every event."""
UNKNOWN_TOP = 128
"""The same where nobody has said the vocabulary's size: no model's is smaller than its bytes'."""
_MOST_IDS = 4096  # stop ids, biases: SGLang pads them to a rectangle of the batch
_MOST_TEXT = 65536  # a grammar; longer ones keep the engine's compiler busy for minutes
_MOST_TEXTS = 64  # stop strings and patterns, each looked for at every token
_INT64 = 2**63
# Smaller ones have fewer digits in the sampler's 32 bits, or none: 1e-46 is 0 there.
_SMALLEST = 2.0**-126
# A logit and a bias, by the least temperature that is not greedy (1e-6), are 1e15: far from 3e38,
# where a number of 32 bits becomes infinite. Masks are written as -1e9 at most.
_MOST_BIAS = 1e9
# A logit by it is finite, whatever a model makes; SGLang takes all that are above 0.
_LEAST_REPETITION = 0.01
_MOST_TEMPERATURE = 1e6  # all tokens are as likely long before; a mask by an infinite one is NaN


class Bounds(msgspec.Struct, frozen=True, gc=False):
    """What is known of the engines that a turn may run on; 0 = unknown, and then not checked.

    Attributes:
        vocabulary: rows of the embedding: ids are below it.
        context: tokens of prompt and answer together.
        drafts: some verify drafts, and sample without what ``_NOT_DRAFTED`` names.
    """

    vocabulary: int = 0
    context: int = 0
    drafts: bool = False


NO_BOUNDS = Bounds()


def least(known: Iterable[Bounds]) -> Bounds:
    """Bounds that hold on every engine; what nobody has said stays unknown."""
    found = list(known)
    return Bounds(
        min((one.vocabulary for one in found if one.vocabulary), default=0),
        min((one.context for one in found if one.context), default=0),
        any(one.drafts for one in found),
    )


Check = Callable[[Any], bool]


def _whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _number(low: float, high: float) -> Check:
    """A number of a range, infinities and NaN being in none, that 32 bits hold as it is."""
    return lambda value: (
        type(value) in {int, float}
        and low <= value <= high
        and (not value or abs(value) >= _SMALLEST)
    )


def _ranged(low: float, high: float) -> tuple[Check, str]:
    return _number(low, high), f"a number from {low:g} to {high:g}"


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _text(most: int) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= most


def _texts(value: object) -> bool:
    few = _text(4096)
    return few(value) or (
        isinstance(value, list) and len(value) <= _MOST_TEXTS and all(map(few, value))
    )


def _patterns(value: object) -> bool:
    """Patterns that compile: SGLang does so in the engine, and answers 500 where it cannot."""
    if not _texts(value):
        return False
    try:
        for one in [value] if isinstance(value, str) else cast("list[str]", value):
            re.compile(one)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_IDS
        and all(type(one) is int and 0 <= one < 2**31 for one in value)
    )


_bearable = _number(-_MOST_BIAS, _MOST_BIAS)


def _bias(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_IDS
        and all(isinstance(key, str) and key.isdecimal() and len(key) < 11 for key in value)
        and all(map(_bearable, value.values()))
    )


def _small(value: object) -> bool:
    """An object of plain values."""
    plain = (str, int, float, bool, type(None))
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_TEXTS
        and all(isinstance(one, plain) for one in value.values())
    )


_COUNT = (_whole(0, 2**31 - 1), "a whole number of at least 0")
_SWITCH = (_flag, "true or false")
_GRAMMAR = (_text(_MOST_TEXT), f"text of at most {_MOST_TEXT} characters")
_STRINGS = (_texts, f"text or a list of at most {_MOST_TEXTS} texts")
_IDS = (_ids, f"a list of at most {_MOST_IDS} token ids")

_SAMPLING: Mapping[str, tuple[Check, str]] = {
    "temperature": _ranged(0, _MOST_TEMPERATURE),
    "top_p": (_number(_SMALLEST, 1), "a number above 0, and at most 1"),
    "min_p": _ranged(0, 1),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _ranged(-2, 2)),
    "repetition_penalty": _ranged(_LEAST_REPETITION, 2),
    "top_k": (_whole(-1, 2**31 - 1), "a whole number of at least -1"),
    "max_new_tokens": _COUNT,
    "min_new_tokens": _COUNT,
    "n": _COUNT,
    "stop_token_ids": _IDS,
    "logit_bias": (
        _bias,
        f"an object of token ids and numbers from {-_MOST_BIAS:g} to {_MOST_BIAS:g}",
    ),
    "sampling_seed": (_whole(-_INT64, _INT64 - 1), "a whole number of 64 bits"),
    "stream_interval": (_whole(1, 1024), "a whole number from 1 to 1024"),
    **dict.fromkeys(
        (
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "no_stop_trim",
        ),
        _SWITCH,
    ),
    "stop": _STRINGS,
    "stop_regex": (
        _patterns,
        f"a pattern or a list of at most {_MOST_TEXTS}, as Python's re reads",
    ),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _GRAMMAR),
    "watermark": (_small, "an object of plain values"),
}
_RANGED = frozenset(
    {"temperature", "top_p", "min_p", "repetition_penalty"}
    | {"frequency_penalty", "presence_penalty"}
)
# Read by custom processors only, and those are refused (they are code). slime sends
# ``custom_params`` with every ``top_p`` below 1.
_UNREAD = frozenset({"custom_params"})


def _unless(*nothing: object) -> Check:
    return lambda value: value not in nothing


def _of_no_vllm(temperature: float) -> bool:
    """VLLM takes 0.01 for what lies between, without a word, and nothing above 2."""
    return 0 < temperature < 0.01 or temperature > 2


SOME_REFUSE: Mapping[str, Check] = {
    "temperature": _of_no_vllm,
    **dict.fromkeys(("min_p", "min_new_tokens"), _unless(0)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _unless(0)),
    "repetition_penalty": _unless(1),
    "sampling_seed": _unless(),
    "logit_bias": _unless({}),
    **dict.fromkeys(
        ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag"), _unless("", [])
    ),
    "watermark": _unless({}),
    "logprob_start_len": _unless(0, -1),
    "token_ids_logprob": _unless([]),
    "sampling_logprobs_mode": _unless(),
    **dict.fromkeys(("return_text_in_logprobs", "return_prompt_token_ids"), _unless(False)),
    **dict.fromkeys(
        ("return_sampling_mask", "return_hidden_states", "return_routed_experts"), _unless(False)
    ),
}
"""Parameters that some engine refuses -> whether a value asks for what it refuses."""

# At a drafted step a penalty is of the tokens before the step, and the others are not there.
_NOT_DRAFTED = frozenset(
    {"min_p", "min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty"}
    | {"sampling_seed", "watermark"}
    | {"return_sampling_mask", "return_hidden_states", "return_routed_experts"}
)

NOT_IN_VLLM = frozenset(SOME_REFUSE)
"""What an engine of vLLM refuses; why is said there (``rose_engines.vllm.sampling``)."""
NOT_BY_SEED = frozenset({"min_p"})
"""What ends an engine of SGLang that samples by seed (``enable-deterministic-inference``)."""

_GREEDY = 1e-6  # SGLang takes the likeliest token below this temperature

REQUEST_FIELDS: Mapping[str, tuple[Check, str]] = {
    "return_logprob": _SWITCH,
    "logprob_start_len": (_whole(-1, 2**31 - 1), "a whole number of at least -1"),
    "top_logprobs_num": (_whole(0, MOST_TOP), f"a whole number from 0 to {MOST_TOP}"),
    "token_ids_logprob": _IDS,
    "return_text_in_logprobs": _SWITCH,
    "return_sampling_mask": _SWITCH,
    "sampling_logprobs_mode": (lambda value: value in ("selected", "support"), "selected, support"),
    "return_prompt_token_ids": _SWITCH,
    "return_hidden_states": (lambda value: _flag(value) or value == "last", "true, false or last"),
    "return_routed_experts": _SWITCH,
    "extra_key": (_text(512), "text of at most 512 characters"),
}
"""Fields beside the sampling parameters that go to the engine."""


def admitted(
    sampling: Mapping[str, Any], request: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a request may be sent; nothing passes that is not on the list.

    Args:
        sampling: SGLang's ``sampling_params``.
        request: fields beside them.

    Returns:
        Both without what asks for nothing, and without what no engine reads.

    Raises:
        UnsafeTurn: a field is unknown, or its value is none that an engine bears; names it.
        InvalidTurn: a number is out of its range; names it.
    """
    return (
        _admitted(sampling, SAMPLING, _SAMPLING, "sampling_params."),
        _admitted(request, REQUEST, REQUEST_FIELDS, ""),
    )


def _admitted(
    given: Mapping[str, Any],
    rows: Mapping[str, SpliceRow],
    rules: Mapping[str, tuple[Check, str]],
    where: str,
) -> dict[str, Any]:
    """One of the two; in one go, for every turn has some fields."""
    asked = {}
    for name, value in given.items():
        if value is None or (rows is SAMPLING and name in _UNREAD):
            continue
        row = rows.get(name)
        if row is not None and row.rule is not SpliceRule.CARRIED and value in row.neutral:
            continue
        rule = rules.get(name)
        if rule is None:
            message = f"{where}{name}: no field that an engine may be sent; leave it out"
            raise UnsafeTurn(message)
        if not rule[0](value):
            message = f"{where}{name}: expected {rule[1]}, got {shown(value)}"
            # Engines say 400 to a number out of its range, and clients know it as that.
            numeric = name in _RANGED and type(value) in {int, float}
            raise InvalidTurn(message) if numeric else UnsafeTurn(message)
        asked[name] = value
    return asked


def check_within(
    prompt: Sequence[int],
    sampling: Mapping[str, Any],
    request: Mapping[str, Any],
    bounds: Bounds,
    highest: int = -1,
) -> None:
    """Whether the engines can bear the turn at all.

    Args:
        prompt: token ids, none below 0.
        sampling: as ``admitted`` has let it through.
        request: likewise.
        bounds: of the engines.
        highest: of the prompt's ids, where that is known already: of a million it takes 10 ms.

    Raises:
        UnsafeTurn: they cannot; says what was asked for and what there is.
        PromptTooLong: the prompt leaves no room for an answer.
    """
    if bounds.drafts:
        _check_drafted(sampling, request)
    top = request.get("top_logprobs_num") or 0
    most = min(bounds.vocabulary, MOST_TOP) if bounds.vocabulary else UNKNOWN_TOP
    if top > most:
        message = f"top_logprobs_num: at most {most} with these engines, got {top}"
        raise UnsafeTurn(message)
    if bounds.context and len(prompt) >= bounds.context:
        check_context(len(prompt), bounds)
    # Last: of a prompt that is too long nobody needs to know the highest id.
    if bounds.vocabulary:
        ids = prompt if highest < 0 else (highest,)
        _check_ids(ids, sampling, request, bounds.vocabulary)


def check_context(tokens: int, bounds: Bounds, *, at_least: bool = False) -> None:
    """Raises ``PromptTooLong`` where one of so many tokens leaves no room for an answer."""
    if bounds.context and tokens >= bounds.context:
        raise PromptTooLong(tokens, bounds.context, at_least=at_least)


def asked_with(sampling: Mapping[str, Any], request: Mapping[str, Any]) -> frozenset[str]:
    """Parameters of a turn that some engine refuses, at a value that it refuses.

    Args:
        sampling: as ``admitted`` has let it through.
        request: likewise.
    """
    found = set()
    for part in (sampling, request):
        for name, value in part.items():
            refuses = SOME_REFUSE.get(name)
            if refuses is not None and value is not None and refuses(value):
                found.add(name)
    return frozenset(found)


def check_taken(asked: frozenset[str], refused: Sequence[Collection[str]]) -> None:
    """Whether some engine takes a turn.

    Args:
        asked: as ``asked_with`` says of it.
        refused: what each engine that it may run on refuses; none attached = nobody knows.

    Raises:
        UnsafeTurn: each of them refuses something of it; names what.
    """
    found = [asked.intersection(one) for one in refused]
    if found and all(found):
        message = (
            f"{', '.join(sorted(found[0]))}: no engine attached that the turn may run on takes it "
            "(vLLM does not do the same by it as SGLang, and deterministic inference takes no "
            "min_p); leave it out, or take engines of SGLang without enable-deterministic-inference"
        )
        raise UnsafeTurn(message)


def _check_drafted(sampling: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """SGLang's sampling of drafts passes over these without a word."""
    for name in sorted(asked_with(sampling, request) & _NOT_DRAFTED):
        message = (
            f"{name}: engines of this lease verify drafts (spec.drafts), where it would not be "
            "kept to; leave it out, or set drafts: Off"
        )
        raise UnsafeTurn(message)
    if _joint(sampling):
        message = (
            "top_p: with top_k another distribution than without drafts, and engines of this lease "
            "verify drafts (spec.drafts); leave one of the two out, or set drafts: Off"
        )
        raise UnsafeTurn(message)


def _joint(sampling: Mapping[str, Any]) -> bool:
    """Whether both top_k and top_p cut the distribution.

    Sampling cuts by both at once. Verifying cuts by top_k, makes what is left sum to 1, and then
    cuts by top_p: fewer tokens are left.
    """
    asked = {name: 1.0 if one is None else one for name, one in sampling.items()}
    sampled = asked.get("temperature", 1.0) >= _GREEDY
    return sampled and asked.get("top_k", -1) > 1 and asked.get("top_p", 1.0) < 1


def _check_ids(
    prompt: Sequence[int], sampling: Mapping[str, Any], request: Mapping[str, Any], size: int
) -> None:
    asked: tuple[tuple[str, Iterable[int]], ...] = (
        ("prompt", prompt),
        ("stop_token_ids", sampling.get("stop_token_ids") or ()),
        ("logit_bias", map(int, sampling.get("logit_bias") or ())),
        ("token_ids_logprob", request.get("token_ids_logprob") or ()),
    )
    for name, ids in asked:
        highest = max(ids, default=0)
        if highest >= size:
            message = f"{name}: token id {highest}, and the model's vocabulary has {size} tokens"
            raise UnsafeTurn(message)
