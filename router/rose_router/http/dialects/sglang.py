"""SGLang's ``POST /generate``: one prompt, a batch, ``n`` answers each, plain or streamed.

Fields that the router does not use go to the engine if they are on the list
(``rose_core.rollouts.requests.fields``). Several answers become turns of
their own; their order in the reply is SGLang's (all answers of the first prompt first).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rose_core.rollouts.errors import InvalidTurn
from rose_core.unreadable import UNREADABLE
from rose_router.http.dialects.common import (
    WITHOUT_EFFECT,
    Hinted,
    Hints,
    Rank,
    Rid,
    TokenId,
    encoded,
    has_hints,
    read_as,
    token_ids,
)
from rose_router.http.dialects.terms import (
    MOST_ANSWERS,
    ParsedRequest,
    PromptTerms,
    Sampling,
    streamed,
)
from rose_router.http.tokenizer.tokenization import Tokenizer
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


class GenerateRequest(Hinted):
    """What of a request is read here."""

    input_ids: object = None
    text: str | list[str] | None = None
    sampling_params: Sampling | list[Sampling | None] | None = None
    stream: bool | None = None
    rid: Rid | list[Rid | None] | None = None
    priority: Rank | None = None


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
    request = read_as(body, GenerateRequest)
    hints = Hints(body, headers, request)
    prompts, batch = _prompts(request, tokenizer)
    turns: list[TurnRequest] = []
    for index, prompt in enumerate(prompts):
        given, sampling = body.get("sampling_params"), request.sampling_params
        if isinstance(sampling, list):
            given = _of_prompt(given, index, "sampling_params")
            sampling = _of_prompt(sampling, index, "sampling_params")
        answers = sampling.n or 1 if sampling is not None else 1
        if len(turns) + answers > MOST_ANSWERS:
            message = f"more than {MOST_ANSWERS} answers in one request; send several requests"
            raise InvalidTurn(message)
        at = index if batch else None
        terms = PromptTerms(
            hints,
            given or {},
            _passed(body, at),
            priority=request.priority or 0,
            tokenizer=tokenizer,
        )
        single = not batch and answers == 1
        for answer in range(answers):
            if request.rid is None:
                rid, own = new_rid(), False
            else:
                rid, own = _rid(request.rid, at, answer, answers, new_rid)
            session = rid if own and single else ""
            turns.append(terms.turn(rid, prompt, own_rid=own, session=session, keyed=own))
    listed = batch or len(turns) > 1
    return ParsedRequest(turns, streamed(request.stream, len(turns)), listed)


_FIELD = b'"input_ids":'
_MOST_KNOWN, _MOST_BYTES = 1024, 1024
_decode_ids = msgspec.json.Decoder(tuple[TokenId, ...]).decode


class RepeatedRequests:
    """Requests that differ from an earlier one in their prompt's ids alone, as a trainer's do.

    Of such a one all but the ids is known, byte by byte: they are all that is read of it, in one
    step and not as a list of objects that is checked and copied. The engine is sent them as they
    were written.

    Args:
        new_rid: makes ids of turns.
    """

    def __init__(self, new_rid: Callable[[], str]) -> None:
        self._new_rid = new_rid
        self._known: dict[bytes, tuple[TurnRequest, bool]] = {}

    def read(self, raw: bytes, headers: Mapping[str, str]) -> ParsedRequest | None:
        """The request, as ``read`` reads it; ``None``: there was none like it."""
        rest, ids = _split(raw)
        known = self._known.get(rest)
        if known is None or has_hints(headers):
            return None
        try:
            prompt = _decode_ids(ids)
        except UNREADABLE:
            return None  # ``read`` says what is wrong with them
        if not prompt:
            return None
        turn, stream = known
        turn = replace(turn, rid=self._new_rid(), prompt=prompt, written=ids)
        return ParsedRequest([turn], stream, listed=False)

    def learn(self, raw: bytes, headers: Mapping[str, str], asked: ParsedRequest) -> None:
        """Remember what was read of a request, if another may say the same of another prompt.

        One that names its turn or its trajectory does not, and what follows from a stop string
        follows from the tokenizer, too.
        """
        rest, _ = _split(raw)
        turn = asked.turns[0]
        if not rest or len(rest) > _MOST_BYTES or asked.listed or has_hints(headers):
            return
        if turn.own_rid or turn.session or turn.sampling.get("stop"):
            return
        # The list that was found is the request's own, and not one of that name within a field:
        # with something else in its place, that is what the request has.
        probe: Any = None
        with contextlib.suppress(*UNREADABLE):
            probe = msgspec.json.decode(rest.replace(b"\0", b"[[]]"))
        if not isinstance(probe, dict) or probe.get("input_ids") != [[]]:
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[rest] = replace(turn, prompt=(), rid="", highest=-1), asked.stream


def _split(raw: bytes) -> tuple[bytes, bytes]:
    """A body with a zero byte, which no JSON has, in place of its ids, and these; empty: none."""
    begin = raw.find(_FIELD) + len(_FIELD)
    if begin < len(_FIELD):
        return b"", b""
    if raw.startswith(b" ", begin):
        begin += 1
    end = raw.find(b"]", begin) + 1
    return b"%b\0%b" % (raw[:begin], raw[end:]), raw[begin:end]


def _prompts(
    asked: GenerateRequest, tokenizer: Tokenizer | None
) -> tuple[list[tuple[int, ...]], bool]:
    ids, text = asked.input_ids, asked.text
    if (ids is None) == (text is None):
        message = "exactly one of input_ids and text must be given"
        raise InvalidTurn(message)
    if ids is not None:
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return [token_ids(value, f"input_ids[{i}]") for i, value in enumerate(ids)], True
        return [token_ids(ids, "input_ids")], False
    texts = text if isinstance(text, list) else [text or ""]
    if not texts:
        message = "text: expected text or a list of texts"
        raise InvalidTurn(message)
    prompts = [encoded(value, tokenizer, "text", "input_ids") for value in texts]
    return prompts, isinstance(text, list)


def _of_prompt(given: Any, index: int, field: str) -> Any:  # noqa: ANN401  # of any field
    """The value of one prompt of a batch, or of all."""
    if not isinstance(given, list):
        return given
    if index >= len(given):
        message = f"{field}: {len(given)} entries, and a prompt number {index}"
        raise InvalidTurn(message)
    return given[index]


def _passed(body: Mapping[str, Any], index: int | None) -> dict[str, Any]:
    passed = dict(body)
    for name in _OWN.intersection(passed):
        del passed[name]
    if index is None:
        return passed
    lists = {name for name in _PER_PROMPT & passed.keys() if isinstance(passed[name], list)}
    asked = passed.get("token_ids_logprob")  # of one prompt it is a list already
    if isinstance(asked, list) and asked and (asked[0] is None or isinstance(asked[0], list)):
        lists.add("token_ids_logprob")
    for name in lists:
        passed[name] = _of_prompt(passed[name], index, name)
    return passed


def _rid(
    named: str | list[str | None] | None,
    index: int | None,
    answer: int,
    answers: int,
    new_rid: Callable[[], str],
) -> tuple[str, bool]:
    """The id of an answer, and whether it is the caller's."""
    if isinstance(named, list) and index is None:
        message = "rid: a list needs a batch, with one entry per prompt"
        raise InvalidTurn(message)
    given: str | None = _of_prompt(named, index or 0, "rid")
    if given is not None and index is not None and not isinstance(named, list):
        given = f"{given}_{index}"
    if given is None:
        return new_rid(), False
    return (f"{given}_{answer}" if answers > 1 else given), True
