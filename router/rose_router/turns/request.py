"""One turn as a caller asks for it, whatever dialect it came in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from propcache.api import cached_property

from rose_core.rollouts.requests import splice
from rose_core.rollouts.requests.fields import asked_with
from rose_core.rollouts.requests.logprobs import LogprobTerms, terms_of
from rose_core.rollouts.requests.stops import Stops
from rose_core.rollouts.trajectories.prospects import NO_HINT, Hint
from rose_core.rollouts.versions import NO_PIN, Pin

_MOST_LEGS = 16
_encode = msgspec.json.Encoder().encode


def named(job: str, name: str) -> str:
    """A caller's name for something of its own, told apart from what other jobs call so."""
    return f"{job}/{name}" if job and name else name


class Parameters(msgspec.Struct, frozen=True, dict=True):
    """What a turn asks of its engine beside its tokens, and all that follows from that alone.

    Turns share it where they ask for the same, so none of it may be changed.

    Attributes:
        sampling: SGLang's ``sampling_params``.
        passed: fields of the request that go to the engine as they are.
    """

    sampling: Mapping[str, Any]
    passed: Mapping[str, Any]

    @cached_property
    def most_tokens(self) -> int:
        """The most output tokens the turn may have."""
        return splice.most_tokens(self.sampling)

    @cached_property
    def logprob_terms(self) -> LogprobTerms:
        """What they make of the turn's log-probs; asked for in every event."""
        return terms_of(self.sampling, self.passed)

    @cached_property
    def legs(self) -> dict[tuple[str, int], bytes]:
        """What first legs say beside prompt and id, in JSON, by cache key and interval."""
        return {}

    @cached_property
    def refusable(self) -> frozenset[str]:
        """Those that some engine refuses."""
        return asked_with(self.sampling, self.passed)


class TurnRequest(msgspec.Struct, frozen=True, dict=True):
    """What is asked, in SGLang's words.

    Attributes:
        rid: the caller's id, or one that the router made up (``own_rid`` false).
        prompt: token ids.
        sampling: SGLang's ``sampling_params``.
        passed: fields of the request that go to the engine as they are.
        session: key that keeps a trajectory's turns together; empty = none.
        keyed: the session's key is the caller's own, not found out by the prompt's prefix.
        job: whose turn it is, of several jobs that share the lease; empty = all the same.
        hint: what the caller says of the trajectory.
        expected: output tokens the caller expects; 0 = no idea.
        priority: higher first while waiting.
        dedicated_because: parameters that cannot move between engines, with the reason.
        stops: strings that end the turn, to be looked for across a move; ``None`` = nothing to do.
        traceparent: of the caller's span, where turns are traced; empty = it has none.
        operation: what the caller does, in OpenTelemetry's words.
        parameters: ``sampling`` and ``passed`` as others have them too; ``None`` = nobody has.
        written: the prompt as its caller wrote it, a list of ids in JSON; empty = not known.
        highest: of its ids, where many were gone through as they were read; -1 = not known.
    """

    rid: str
    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    own_rid: bool = False
    passed: Mapping[str, Any] = msgspec.field(default_factory=dict)
    session: str = ""
    keyed: bool = False
    job: str = ""
    hint: Hint = NO_HINT
    pin: Pin = NO_PIN
    expected: int = 0
    priority: int = 0
    dedicated_because: tuple[str, ...] = ()
    stops: Stops | None = None
    traceparent: str = ""
    operation: str = "text_completion"
    parameters: Parameters | None = None
    written: bytes = b""
    highest: int = -1

    def but(self, **changes: Any) -> TurnRequest:  # noqa: ANN401  # values of fields
        """The same request with other values."""
        return replace(self, **changes)

    def of_job(self, job: str) -> TurnRequest:
        """The same turn as one of the job: what it names is the job's own."""
        if not job:
            return self
        hint = replace(self.hint, group=named(job, self.hint.group))
        return self.but(job=job, session=named(job, self.session), hint=hint)

    @cached_property  # asked for a dozen times in a turn
    def trajectory(self) -> str:
        """Name of the trajectory; a turn without session is one by itself."""
        return self.session or named(self.job, self.rid)

    @cached_property
    def asks(self) -> Parameters:
        """What it asks of its engine."""
        shared = self.parameters
        if shared and shared.sampling is self.sampling and shared.passed is self.passed:
            return shared
        return Parameters(self.sampling, self.passed)

    @property
    def most_tokens(self) -> int:
        """The most output tokens the turn may have."""
        return self.asks.most_tokens

    @property
    def name(self) -> tuple[str, str]:
        """The id among all turns: jobs do not see each other's."""
        return (self.job, self.rid)

    def fingerprint(self) -> str:
        """Tells two bodies under the same id apart."""
        body = (self.prompt, self.sampling, self.passed, str(self.pin))
        return hashlib.blake2b(
            msgspec.json.encode(body, order="sorted"), digest_size=16
        ).hexdigest()

    def leg_body(
        self, context: Sequence[int], held: int, rid: str, cache_key: str, interval: int = 1
    ) -> dict[str, Any]:
        """The request of one leg, for SGLang's ``/generate``.

        Args:
            context: prompt and held tokens.
            held: how many of them are output.
            rid: the leg's own id.
            cache_key: keeps prefix caches of different weight versions apart.
            interval: tokens per event of its stream.
        """
        body = dict(self.passed)
        if held:
            # What the first leg said about the prompt is kept; held tokens are not prompt.
            body.pop("logprob_start_len", None)
        sampling = splice.remaining(self.sampling, held)
        if interval > 1:
            sampling.setdefault("stream_interval", interval)
        key = (
            f"{cache_key}/{self.passed['extra_key']}" if self.passed.get("extra_key") else cache_key
        )
        return body | {
            "input_ids": context,
            "sampling_params": sampling,
            "stream": True,
            "rid": rid,
            "extra_key": key,
        }

    def leg_json(self, rid: str, cache_key: str, interval: int = 1) -> bytes:
        """The request of a first leg, where the prompt is ``written``; else as ``leg_body``."""
        legs = self.asks.legs
        rest = legs.get((cache_key, interval))
        if rest is None:
            body = self.leg_body((), 0, rid, cache_key, interval)
            del body["input_ids"], body["rid"]
            if len(legs) >= _MOST_LEGS:
                legs.clear()  # each publish brings another key
            rest = legs[cache_key, interval] = _encode(body)[1:]
        return b'{"input_ids":%b,"rid":%b,%b' % (self.written, _encode(rid), rest)
