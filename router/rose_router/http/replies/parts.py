"""A turn as SGLang or OpenAI would have answered it, with what only the router knows beside it.

``meta_info.rose`` (SGLang) and ``rose`` (OpenAI) hold: engines and their kinds, moves, tokens
sampled again, provenance of the keys and values, and what the log-probs mean.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from rose_core.rollouts.requests.logprobs import SCALE, semantics
from rose_core.rollouts.requests.stops import sure, trimmed
from rose_core.rollouts.transcripts.detokenize import IncrementalDetokenizer
from rose_core.rollouts.transcripts.spans import Kv, TokenSpan
from rose_core.rollouts.transcripts.transcript import PER_TOKEN
from rose_router.errors import BadRequest, RouterError, TurnLost, Unprocessable
from rose_router.http.conversations.history import EXPERTS, routing_of
from rose_router.http.dialects.terms import ParsedRequest
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns.turn import Turn, TurnMove, VisibleOutput, typed_abort

# Facts about one leg that would be wrong for a turn of several, or that the router answers itself.
_OWN = frozenset(
    {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency"}
    | {"weight_version", "weight_versions", "output_token_logprobs_length"}
    | {"output_token_sampling_mask_length"}
    | {"input_token_logprobs", "input_top_logprobs", SCALE, EXPERTS, *PER_TOKEN}
)

_NOTHING: Mapping[str, Any] = {}
_OWN_KV = Kv.OWN  # named once: an enum's member is slow to find


def spans_json(spans: Sequence[TokenSpan], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ordered spans as they stand in replies; ``label`` where the trainer has its own name."""
    rows: list[dict[str, Any]]
    if len(spans) == 1:  # the usual case: no call for a list
        span = spans[0]
        rows = [{"version": span.version, "start": span.start, "end": span.end, "kv": span.kv}]
    else:
        rows = [{"version": s.version, "start": s.start, "end": s.end, "kv": s.kv} for s in spans]
    if labels:
        for one in rows:
            if one["version"] in labels:
                one["label"] = labels[one["version"]]
    return rows


def rose_json(turn: Turn, spans: Sequence[TokenSpan]) -> dict[str, Any]:
    """What only the router knows; made for every event of every stream."""
    legs, leg, terms = turn.transcript.legs, turn.leg, turn.request.asks.logprob_terms
    if leg is not None and not legs and len(spans) == 1:  # the usual case: no calls for lists
        engines = [{"engine": leg.engine, "kind": leg.kind, "tokens": leg.placed}]
        own, meant = spans[0].kv is _OWN_KV, terms.formula(leg.meta.get(SCALE, ""))
    else:
        legs = legs if leg is None else [*legs, leg]
        engines = [{"engine": one.engine, "kind": one.kind, "tokens": one.placed} for one in legs]
        scales = [(one.offset, one.meta.get(SCALE, "")) for one in legs if one.placed]
        own = all([span.kv is _OWN_KV for span in spans])  # noqa: C419  # generators cost twice that
        meant = semantics(scales, spans[-1].end if spans else 0, terms)
    return {
        "borrowed": turn.borrowed,
        "engines": engines,
        "moves": turn.moves and [_move(moved) for moved in turn.moves],
        "redone_tokens": turn.redone_tokens,
        "kv": _OWN_KV if own else Kv.MIXED,
        "queue_seconds": turn.queue_seconds and round(turn.queue_seconds, 6),
        "exact_text": turn.transcript.exact_text,
        "logprob_semantics": meant,
    }


def rose_with_abort(turn: Turn, spans: Sequence[TokenSpan]) -> dict[str, Any]:
    """The same for dialects whose finish reason is a word: why a turn was cut short stands here."""
    rose = rose_json(turn, spans)
    if (finish := turn.finish) is not None and finish["type"] == "abort":
        rose["abort"] = {name: finish.get(name) for name in ("message", "status_code", "err_type")}
    return rose


def stream_error(turns: Sequence[Turn]) -> dict[str, Any] | None:
    """Why a stream of OpenAI's or vLLM's dialect ends, as SGLang says it behind what was shown.

    ``None``: an answer came to its end, or somebody asked for the abort: that is no error.
    """
    for turn in turns:
        finish = turn.finish or _NOTHING
        if finish.get("type") != "abort" or finish.get("status_code") is None:
            return None
    failed = turns[0].finish or _NOTHING
    error = {"object": "error", "message": failed.get("message"), "type": failed.get("err_type")}
    return {"error": {**error, "param": None, "code": failed["status_code"]}}


def cut_short(turn: Turn) -> RouterError | None:
    """A turn that was cut short, as an error: a harness cannot tell it from an answer."""
    typed_abort(turn)
    finish = turn.finish or _NOTHING
    if finish.get("type") != "abort":
        return None
    status, reason = finish.get("status_code"), finish.get("err_type") or "Aborted"
    message = finish.get("message", "aborted")
    if status == BadRequest.status:
        return BadRequest(reason, message)
    if status == Unprocessable.status:
        return Unprocessable(reason, message)
    return TurnLost(reason, f"the turn was cut short ({message}); ask again", retry_after=1)


def conversation_json(
    turn: Turn,
    ask: ParsedRequest,
    not_shown: Sequence[str] = (),
    shown: VisibleOutput | None = None,
) -> dict[str, Any]:
    """What stands beside an answer of a conversation.

    Args:
        turn: the turn.
        ask: the request.
        not_shown: types of tools that the model was not shown.
        shown: what may be shown of it, where it is known already.
    """
    shown = shown or turn.shown()
    rose = rose_with_abort(turn, shown.spans)
    if ask.conversation is not None:
        rose["history"] = ask.conversation.as_json
        # By its messages, a session without a key is its first turn.
        rose["session"] = ask.session or turn.request.rid
        rose["session_by"] = ask.session_by or "rid"
    if not_shown:
        rose["tools_not_shown"] = not_shown
    return {"weight_versions": spans_json(shown.spans, turn.labels), "rose": rose}


def _move(moved: TurnMove) -> dict[str, Any]:
    return {"reason": moved.reason, "engine": moved.engine, "at_token": moved.at_token}


def text_of(turn: Turn, shown: VisibleOutput, tokenizer: Tokenizer | None) -> str:
    """The output as text: the engines' own, or decoded anew when a cut made theirs inexact.

    While the turn goes on, what later tokens may change is left out, as engines leave it out.
    """
    if turn.transcript.exact_text or tokenizer is None:
        text = shown.text
    else:
        text = _decoded(turn, shown, tokenizer)
    stops = turn.request.stops
    return text if stops is None or turn.is_over else sure(text, stops.strings)


def _decoded(turn: Turn, shown: VisibleOutput, tokenizer: Tokenizer) -> str:
    sampling = turn.request.sampling
    decode = partial(tokenizer.decode, skip_special=bool(sampling.get("skip_special_tokens", True)))
    if turn.is_over:
        text = decode(shown.tokens)
        return trimmed(text, turn.finish, keep=bool(sampling.get("no_stop_trim")))
    if turn.detokenizer is None:
        turn.detokenizer = IncrementalDetokenizer(decode)
    return turn.detokenizer.text(shown.tokens)


def sglang(
    turn: Turn, tokenizer: Tokenizer | None, shown: VisibleOutput | None = None
) -> dict[str, Any]:
    """The reply of ``/generate``; cumulative, as SGLang streams it."""
    shown = shown or turn.shown()
    return {
        "text": text_of(turn, shown, tokenizer),
        "output_ids": shown.tokens,
        "meta_info": meta_info(turn, shown),
    }


def meta_info(turn: Turn, shown: VisibleOutput) -> dict[str, Any]:
    """What SGLang says beside an answer; a chat has it where it asks (``return_meta_info``)."""
    count, asked = len(shown.tokens), turn.request
    meta: dict[str, Any] = {
        **_engine_meta(turn),
        **turn.prompt_meta,
        **shown.per_token,
        "id": asked.rid,
        "finish_reason": turn.finish,
        "prompt_tokens": len(asked.prompt),
        "completion_tokens": count,
        "cached_tokens": turn.prompt_meta.get("cached_tokens", 0),
        "weight_version": turn.version_label(shown.spans),
        "weight_versions": spans_json(shown.spans, turn.labels),
        "rose": rose_json(turn, shown.spans),
    }
    if turn.is_over:
        meta["e2e_latency"] = turn.ended - turn.began
        if asked.passed.get("return_routed_experts"):
            meta |= _experts(turn)
    if "output_token_sampling_mask" in shown.per_token:
        meta["output_token_sampling_mask_length"] = count
    if "output_token_logprobs" in shown.per_token:
        meta["output_token_logprobs_length"] = count
    elif asked.passed.get("return_logprob"):
        # Callers that asked for them read them before they look at the finish reason.
        meta["output_token_logprobs"] = []
    return meta


def _experts(turn: Turn) -> dict[str, Any]:
    """Rows of experts, and how many of sampled tokens are of a later engine than theirs."""
    found = routing_of(turn)
    if found is None:
        return {EXPERTS: None, "routed_experts_recomputed": None}
    given = turn.last_meta
    if given["completion_tokens"] == len(turn.transcript.legs[-1].ids):
        rows = given[EXPERTS]  # nothing was cut
    else:
        rows = base64.b64encode(found.rows).decode()
    return {EXPERTS: rows, "routed_experts_recomputed": found.recomputed}


def _engine_meta(turn: Turn) -> Mapping[str, Any]:
    """What the engine of the last leg that ended said, where it is true of the whole turn."""
    last = turn.last_meta
    if _OWN.issuperset(last):  # asked in C, and what engines say without anything special
        return _NOTHING
    return {name: last[name] for name in last if name not in _OWN}


def finish_reason(finish: Mapping[str, Any] | None) -> str | None:
    """OpenAI's finish reason; ``abort`` stays a word of its own."""
    return None if finish is None else str(finish["type"])


def stop_reason(finish: Mapping[str, Any] | None) -> str | int | None:
    """The string or token that ended the turn, as vLLM names it beside the finish reason."""
    return None if finish is None else finish.get("matched")


def stop_reasons(finish: Mapping[str, Any] | None) -> dict[str, str | int | None]:
    """The same, under vLLM's name and under SGLang's."""
    reason = stop_reason(finish)
    return {"stop_reason": reason, "matched_stop": reason}


def usage(turns: Sequence[Turn]) -> dict[str, int]:
    """OpenAI's count of tokens, of all answers of a request; a prompt counts once."""
    # Answers to one prompt share it; two prompts that are equal are two objects.
    prompts = {id(turn.request.prompt): turn.request.prompt for turn in turns}
    prompt = sum(map(len, prompts.values()))
    made = sum(turn.held for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }


class TokenNames:
    """How log-probs name tokens: by their text, or as ``token_id:N``.

    Args:
        tokenizer: ``None`` = by their ids.
        by_id: the caller wants ids (``return_tokens_as_token_ids``).
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, by_id: bool = False) -> None:
        self._tokenizer = None if by_id else tokenizer

    def name(self, token: int) -> str:
        """A token as text, or by its number where the lease has no tokenizer."""
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def entry_json(self, entry: Sequence[Any]) -> dict[str, Any]:
        """An entry ``[logprob, id, ...]`` as a chat has it."""
        name = self.name(entry[1])
        known = None if self._tokenizer is None else list(name.encode())
        return {"token": name, "logprob": entry[0], "bytes": known}


BY_ID = TokenNames()


def openai_choice(
    turn: Turn,
    index: int,
    tokenizer: Tokenizer | None,
    *,
    names: TokenNames = BY_ID,
    since: int = 0,
    text_since: int = 0,
    prompt: msgspec.Raw | None = None,
) -> dict[str, Any]:
    """One choice of ``/v1/completions``, from output token ``since`` on.

    ``prompt``: its ids as they are written; ``None`` = they are written with the choice.
    """
    shown = turn.shown()
    ids = shown.tokens[since:]
    choice: dict[str, Any] = {
        "index": index,
        "text": text_of(turn, shown, tokenizer)[text_since:],
        "finish_reason": finish_reason(turn.finish),
        **stop_reasons(turn.finish),
        "logprobs": _openai_logprobs(shown, since, names),
        "token_ids": ids,
        "response_token_ids": ids,
        "weight_versions": spans_json(shown.spans, turn.labels),
        "rose": rose_with_abort(turn, shown.spans),
    }
    if not since:
        choice["prompt_token_ids"] = turn.request.prompt if prompt is None else prompt
    return choice


def vllm_choice(turn: Turn, index: int, since: int = 0) -> dict[str, Any]:
    """One choice of ``/inference/v1/generate``, from output token ``since`` on."""
    shown = turn.shown()
    return {
        "index": index,
        "token_ids": shown.tokens[since:],
        "finish_reason": finish_reason(turn.finish),
        "stop_reason": stop_reason(turn.finish),
        "logprobs": token_logprobs(shown, since),
        "weight_versions": spans_json(shown.spans, turn.labels),
        "rose": rose_with_abort(turn, shown.spans),
    }


def token_logprobs(
    shown: VisibleOutput, since: int, names: TokenNames = BY_ID
) -> dict[str, Any] | None:
    """Log-probs as vLLM's token route and OpenAI's chat have them."""
    entries = shown.per_token.get("output_token_logprobs")
    if entries is None:
        return None
    tops = shown.per_token.get("output_top_logprobs") or [None] * len(entries)
    pairs = zip(entries[since:], tops[since:], strict=True)
    content = [
        names.entry_json(entry) | {"top_logprobs": [names.entry_json(one) for one in top or ()]}
        for entry, top in pairs
    ]
    return {"content": content}


def _openai_logprobs(shown: VisibleOutput, since: int, names: TokenNames) -> dict[str, Any] | None:
    entries = shown.per_token.get("output_token_logprobs")
    if entries is None:
        return None
    entries = entries[since:]
    top = shown.per_token.get("output_top_logprobs")
    return {
        "tokens": [names.name(entry[1]) for entry in entries],
        "token_logprobs": [entry[0] for entry in entries],
        "top_logprobs": None if top is None else [_top(step, names) for step in top[since:]],
        "text_offset": [-1] * len(entries),  # as SGLang says that it does not know
    }


def _top(step: Sequence[Sequence[Any]] | None, names: TokenNames) -> dict[str, Any]:
    return {names.name(entry[1]): entry[0] for entry in step or ()}
