"""A request, whatever dialect it came in: the terms its turns run on, and how it is answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.requests import fields, splice
from rose_core.rollouts.requests.stops import Stops
from rose_core.unreadable import UNREADABLE
from rose_router.http.conversations.history import Conversation
from rose_router.http.dialects.common import MOST_AT_ONCE, Hints, Whole, highest_of, read_as
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns.request import Parameters, TurnRequest

MOST_ANSWERS = 4096
MOST_STREAMED = 64
"""Answers in a stream whose events each say all of an answer so far, as SGLang's do: they cost the
square of its length."""
Answers = Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS)]


class Sampling(msgspec.Struct):
    """What of SGLang's ``sampling_params`` the router does itself."""

    n: Answers | None = None
    min_new_tokens: Whole | None = None
    stop: str | list[str] | None = None


class ParsedRequest(msgspec.Struct, frozen=True):
    """A request: its turns, whether the caller streams and whether the reply is a list.

    Attributes:
        usage: the caller wants the last event of its stream to count tokens.
        conversation: the prompt, where it was made of messages.
        recorded: its tokens are kept for training rows.
        session: of its trajectory, by its caller's name; empty = it has none.
        session_by: what says so.
    """

    turns: list[TurnRequest]
    stream: bool
    listed: bool
    usage: bool = False
    conversation: Conversation | None = None
    recorded: bool = False
    session: str = ""
    session_by: str = ""


class PromptTerms:
    """What the answers to one prompt have in common, checked once.

    Args:
        hints: what the caller says beside the turn.
        sampling: SGLang's ``sampling_params``.
        passed: fields beside it that ask something of the engine.
        priority: higher waits shorter.
        tokenizer: for stop strings; without it turns that have some are not moved.

    Raises:
        InvalidTurn: the parameters are wrong, or not on the list; names the field.
    """

    def __init__(
        self,
        hints: Hints,
        sampling: Mapping[str, Any],
        passed: Mapping[str, Any],
        *,
        priority: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._checked = _checked(sampling, passed, tokenizer)
        self._hints, self._priority = hints, priority
        self._looked_at: tuple[tuple[int, ...], int] = (), -1

    def turn(
        self,
        rid: str,
        prompt: tuple[int, ...],
        *,
        own_rid: bool,
        session: str = "",
        keyed: bool = False,
    ) -> TurnRequest:
        """One answer.

        Args:
            rid: its id.
            prompt: token ids.
            own_rid: the id is the caller's.
            session: where the caller names none.
            keyed: its trajectory needs not be recognized by its prompt.
        """
        hints, checked = self._hints, self._checked
        if len(prompt) > MOST_AT_ONCE and self._looked_at[0] is not prompt:
            self._looked_at = prompt, highest_of(prompt)
        return TurnRequest(
            rid=rid,
            prompt=prompt,
            sampling=checked.parameters.sampling,
            own_rid=own_rid,
            passed=checked.parameters.passed,
            session=hints.session or session,
            keyed=bool(hints.session) or keyed,
            job=hints.job,
            hint=hints.trajectory,
            pin=hints.pin,
            expected=hints.expected,
            priority=self._priority,
            dedicated_because=checked.because,
            stops=checked.stops,
            parameters=checked.parameters,
            highest=self._looked_at[1] if self._looked_at[0] is prompt else -1,
        )

    def turns(
        self, asked: Iterable[tuple[str, tuple[int, ...]]], *, own_rid: bool, session: str = ""
    ) -> list[TurnRequest]:
        """One answer for every id and prompt; ``session`` is for a caller that names none."""
        return [
            self.turn(rid, prompt, own_rid=own_rid, session=session, keyed=bool(session))
            for rid, prompt in asked
        ]


class _Checked(msgspec.Struct, frozen=True, gc=False):
    """Parameters of a turn that may be sent, and what follows from them."""

    parameters: Parameters
    because: tuple[str, ...]
    stops: Stops | None


_KNOWN: dict[bytes, _Checked] = {}
_MOST_KNOWN, _MOST_BYTES = 1024, 1024
_encode = msgspec.json.Encoder().encode


def _checked(
    sampling: Mapping[str, Any], passed: Mapping[str, Any], tokenizer: Tokenizer | None
) -> _Checked:
    """Parameters, checked once: a trainer sends the same with all its turns.

    They are told apart by their JSON: as Python's values 1, 1.0 and true would be equal.
    """
    if sampling.get("stop"):
        return _check(sampling, passed, tokenizer)
    try:
        key = _encode((sampling, passed))
    except (*UNREADABLE, OverflowError, TypeError, ValueError):
        return _check(sampling, passed, tokenizer)
    found = _KNOWN.get(key)
    if found is None:
        found = _check(sampling, passed, tokenizer)
        if len(key) <= _MOST_BYTES:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = found
    return found


def _check(
    sampling: Mapping[str, Any], passed: Mapping[str, Any], tokenizer: Tokenizer | None
) -> _Checked:
    # What would go wrong only when the turn is continued is refused now.
    asked, most = read_as(sampling, Sampling), splice.most_tokens(sampling)
    if (asked.min_new_tokens or 0) > most:
        message = f"min_new_tokens: expected at most {most}, as max_new_tokens says"
        raise InvalidTurn(message)
    stops = _stops(asked.stop, tokenizer)
    because = splice.dedicated_because(sampling, passed, ("stop",) if stops else ())
    return _Checked(Parameters(*fields.admitted(sampling, passed)), because, stops)


def _stops(given: str | list[str] | None, tokenizer: Tokenizer | None) -> Stops | None:
    if not given or tokenizer is None:
        return None
    return tokenizer.stops([given] if isinstance(given, str) else given)


def streamed(asked: bool | None, answers: int) -> bool:
    """Whether the caller streams.

    Args:
        asked: as it says.
        answers: of the request.

    Raises:
        InvalidTurn: more answers than a stream may hold.
    """
    stream = bool(asked)
    if stream and answers > MOST_STREAMED:
        message = f"stream: at most {MOST_STREAMED} answers in one stream; send several requests"
        raise InvalidTurn(message)
    return stream
