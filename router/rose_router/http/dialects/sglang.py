"""SGLang's ``POST /generate``: one prompt, a batch, ``n`` answers each, plain or streamed.

Fields that the router does not use go to the engine if they are on the list
(``rose_core.rollouts.fields``). Several answers become turns of
their own; their order in the reply is SGLang's (all answers of the first prompt first).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rose_core.rollouts.errors import InvalidTurn
from rose_router.http.dialects.common import (
    WITHOUT_EFFECT,
    Hints,
    caller_rid,
    encoded,
    priority,
    token_ids,
    whole_number,
)
from rose_router.http.dialects.terms import MOST_ANSWERS, ParsedRequest, PromptTerms, streamed
from rose_router.http.tokenization import Tokenizer
from rose_router.turns.request import TurnRequest

# Read here; everything else of a request asks something of the engine.
_OWN = frozenset(
    {"input_ids", "text", "rid", "sampling_params", "stream", "rose"}
    | {"session_id", "routing_key", "priority"}
    | WITHOUT_EFFECT
)
# Fields that may hold one value per prompt of a batch.
_PER_PROMPT = frozenset(
    {"return_logprob", "logprob_start_len", "top_logprobs_num", "extra_key"}
    | {"lora_path", "custom_logit_processor", "return_hidden_states"}
)


def read(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    tokenizer: Tokenizer | None,
    new_rid: Callable[[], str],
) -> ParsedRequest:
    """Read a request.

    Raises:
        InvalidTurn: something is wrong with it; names the field.
    """
    prompts, batch = _prompts(body, tokenizer)
    hints, ranked = Hints(body, headers), priority(body)
    turns: list[TurnRequest] = []
    for index, prompt in enumerate(prompts):
        sampling = _sampling(body, index)
        answers = whole_number(sampling, "n", 1, least=1)
        if len(turns) + answers > MOST_ANSWERS:
            message = f"more than {MOST_ANSWERS} answers in one request; send several requests"
            raise InvalidTurn(message)
        at = index if batch else None
        terms = PromptTerms(
            hints, sampling, _passed(body, at), priority=ranked, tokenizer=tokenizer
        )
        single = not batch and answers == 1
        for answer in range(answers):
            rid, own = _rid(body, at, answer, answers, new_rid)
            session = rid if own and single else ""
            turns.append(terms.turn(rid, prompt, own_rid=own, session=session, keyed=own))
    listed = batch or len(turns) > 1
    return ParsedRequest(turns, streamed(body, several=listed), listed)


def _prompts(
    body: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[list[tuple[int, ...]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        message = "exactly one of input_ids and text must be given"
        raise InvalidTurn(message)
    if ids is not None:
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return [token_ids(value, f"input_ids[{i}]") for i, value in enumerate(ids)], True
        return [token_ids(ids, "input_ids")], False
    texts: list[Any] = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(value, str) for value in texts):
        message = "text: expected text or a list of texts"
        raise InvalidTurn(message)
    prompts = [encoded(value, tokenizer, "text", "input_ids") for value in texts]
    return prompts, isinstance(text, list)


def _sampling(body: Mapping[str, Any], index: int) -> dict[str, Any]:
    value = body.get("sampling_params")
    if isinstance(value, list):
        if index >= len(value):
            message = f"sampling_params: {len(value)} entries, and a prompt number {index}"
            raise InvalidTurn(message)
        value = value[index]
    if value is None:
        return {}
    if not isinstance(value, dict):
        message = f"sampling_params: expected an object, got {type(value).__name__}"
        raise InvalidTurn(message)
    return value


def _passed(body: Mapping[str, Any], index: int | None) -> dict[str, Any]:
    passed = {name: value for name, value in body.items() if name not in _OWN}
    if index is None:
        return passed
    lists = {name for name in _PER_PROMPT & passed.keys() if isinstance(passed[name], list)}
    asked = passed.get("token_ids_logprob")  # of one prompt it is a list already
    if isinstance(asked, list) and asked and (asked[0] is None or isinstance(asked[0], list)):
        lists.add("token_ids_logprob")
    for name in lists:
        value = passed[name]
        if index >= len(value):
            message = f"{name}: {len(value)} entries, and a prompt number {index}"
            raise InvalidTurn(message)
        passed[name] = value[index]
    return passed


def _rid(
    body: Mapping[str, Any],
    index: int | None,
    answer: int,
    answers: int,
    new_rid: Callable[[], str],
) -> tuple[str, bool]:
    value = body.get("rid")
    if isinstance(value, list):
        if index is None or index >= len(value):
            message = "rid: a list needs one entry per prompt of a batch"
            raise InvalidTurn(message)
        value = value[index]
    elif value is not None and index is not None:
        value = f"{value}_{index}"
    rid, own = caller_rid(value, new_rid)
    return (f"{rid}_{answer}", own) if own and answers > 1 else (rid, own)
