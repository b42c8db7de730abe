"""One turn from request to last token: the states below, its transcript and whoever listens.

    Waiting --placed--> Running --finished--> Done
    Running --engine lost, paused too long, revoked--> Waiting   (tokens are kept)
    Waiting/Running --aborted by the caller, budget spent--> Done (finish reason ``abort``)
    Waiting/Running --refused, no token held--> Failed            (an HTTP error)

``TurnRunner`` moves it along these edges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from rose_core.rollouts.engines.suspects import SuspectRecord
from rose_core.rollouts.placement.selection import TurnView
from rose_core.rollouts.placement.watch import MoveReason
from rose_core.rollouts.requests.fields import Bounds, check_within
from rose_core.rollouts.transcripts.detokenize import IncrementalDetokenizer
from rose_core.rollouts.transcripts.spans import TokenSpan, covers, cut, joined, shifted
from rose_core.rollouts.transcripts.transcript import Leg, Transcript
from rose_router.engines.fleet import Engine, LiveLeg, Signal
from rose_router.errors import RouterError
from rose_router.turns.request import TurnRequest


class TurnState(StrEnum):
    """Where a turn stands."""

    WAITING = "Waiting"
    RUNNING = "Running"
    DONE = "Done"
    FAILED = "Failed"


# Named once: an enum's member is slow to find.
_WAITING, _, _DONE, _FAILED = TurnState


@dataclass(frozen=True, slots=True)
class TurnMove:
    """The turn left an engine; ``at_token`` output tokens were held then."""

    reason: MoveReason
    engine: str
    at_token: int


class TurnTrace(Protocol):
    """Hears what happens to a turn, where traces are exported (``tracing.TurnSpans``)."""

    @property
    def traceparent(self) -> str:
        """What an engine is told, so that its spans are below the turn's."""

    def begin_leg(self, leg: Leg) -> None:
        """A request goes to an engine."""

    def see_version(self, version: str) -> None:
        """Tokens have come that this version sampled."""

    def end_leg(self, leg: Leg) -> None:
        """It has ended, by itself or not."""

    def move(self, move: TurnMove) -> None:
        """The turn has left an engine."""

    def end(self, turn: Turn) -> None:
        """The turn has ended."""


class VisibleOutput(msgspec.Struct, frozen=True, gc=False):
    """What may be shown of a turn: only tokens whose version is known."""

    tokens: list[int]
    per_token: Mapping[str, list[Any]]
    spans: tuple[TokenSpan, ...]
    text: str


class TurnEnd:
    """The end of a turn, which comes once.

    asyncio's event can be cleared and asks whose loop it is, which costs a turn as much as its end.
    """

    __slots__ = ("_waiting", "has_come")

    def __init__(self) -> None:
        self.has_come = False
        self._waiting: dict[asyncio.Future[None], None] = {}

    def set(self) -> None:
        """It has come: wake all who wait."""
        self.has_come = True
        for one in self._waiting:
            if not one.done():
                one.set_result(None)

    async def wait(self) -> None:
        """Wait for it."""
        if not self.has_come:
            future = asyncio.get_running_loop().create_future()
            self._waiting[future] = None
            try:
                await future
            finally:
                del self._waiting[future]


class Turn(msgspec.Struct, eq=False):
    """A turn in the router.

    Attributes:
        began: seconds of the router's clock.
        interval: tokens per event of engines' streams; more than one where nobody watches it.
        born: what it ranks by among turns of its job; smaller goes first.
        finish: SGLang's finish reason once it is done.
        error: why it failed.
        record: what is known against it (``suspects``).
        checked: the bounds that it is known to keep.
        labels: the trainer's own names of weight versions.
        detokenizer: makes the text of a turn that moved, while it goes on.
        changed: fires whenever there is more to show.
        listeners: callers waiting for it; when the last one leaves, it is aborted.
        abandoned: the last one left before its end.
        cancelled: its task was, since somebody ended it.
        abort_message: why.
        abort_status: the same as an error's, where nobody asked for its end.
        reserved: where a place is kept for it, since it is to leave a closed gate, and the view
            that its job was charged by.
        task: runs it; its caller's where nobody else can listen, up to its end.
        trace: its spans; ``None`` = turns are not traced.
    """

    request: TurnRequest
    began: float
    transcript: Transcript
    interval: int = 1
    state: TurnState = _WAITING
    leg: Leg | None = None
    handle: LiveLeg | None = None
    finish: Mapping[str, Any] | None = None
    error: Exception | None = None
    ended: float = 0.0
    born: int | None = None
    first_token_at: float = 0.0
    queue_seconds: float = 0.0
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    prompt_meta: dict[str, Any] = msgspec.field(default_factory=dict)
    last_meta: Mapping[str, Any] = msgspec.field(default_factory=dict)
    moves: list[TurnMove] = msgspec.field(default_factory=list)
    detokenizer: IncrementalDetokenizer | None = None
    redone_tokens: int = 0
    losses: int = 0
    record: SuspectRecord = msgspec.field(default_factory=SuspectRecord)
    checked: Bounds | None = None
    listeners: int = 0
    abandoned: bool = False
    reserved: tuple[Engine, TurnView] | None = None
    abort_message: str = ""
    abort_status: int | None = None
    cancelled: bool = False
    changed: Signal = msgspec.field(default_factory=Signal)
    ended_event: TurnEnd = msgspec.field(default_factory=TurnEnd)
    task: asyncio.Task[None] | None = None
    trace: TurnTrace | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self.state is _DONE or self.state is _FAILED

    def version_label(self, spans: Sequence[TokenSpan]) -> str | None:
        """The newest version of the spans, by the trainer's own name where it gave one."""
        if not spans:
            return None
        return self.labels.get(spans[-1].version, spans[-1].version)

    @property
    def held(self) -> int:
        """Output tokens that no loss can take away any more."""
        return len(self.transcript.tokens)

    @property
    def borrowed(self) -> bool:
        """A borrowed engine gave at least one token."""
        return self.transcript.borrowed

    def view(self, home: str, cached: int, usual_tokens: float) -> TurnView:
        """For placement.

        Args:
            home: engine of the session's last turn.
            cached: tokens of the context that it has keys for.
            usual_tokens: output tokens of turns so far, on average.
        """
        transcript, request = self.transcript, self.request
        held, asks = len(transcript.tokens), request.asks
        left = max(1, asks.most_tokens - held)
        expected = request.expected - held if request.expected else usual_tokens
        return TurnView(
            len(transcript.prompt) + held,
            min(left, max(1, round(expected))),
            request.pin,
            bool(request.dedicated_because),
            home,
            cached,
            losses=self.losses,
            alone=self.record.must_be_alone(),
            asked=asks.refusable,
        )

    def shown(self) -> VisibleOutput:
        """What may be shown now; its lists grow when more is taken, so use it at once."""
        held, leg = self.transcript, self.leg
        if leg is None or not leg.placed:
            return VisibleOutput(held.tokens, held.per_token, held.spans, held.text)
        if not leg.offset and leg.placed == len(leg.ids) and self.request.pin.exact is None:
            # The usual case, and asked in every event of every stream: nothing is copied.
            return VisibleOutput(leg.ids, leg.per_token, leg.spans, leg.placed_text)
        until = self._visible(leg)
        per_token = {
            name: held.per_token.get(name, []) + values[:until]
            for name, values in leg.per_token.items()
        }
        spans = leg.spans
        if held.spans or until < leg.placed:
            spans = joined((*held.spans, *shifted(cut(spans, until), leg.offset)))
        text = leg.placed_text if until == leg.placed else ""
        return VisibleOutput(held.tokens + leg.ids[:until], per_token, spans, held.text + text)

    def newest(self, most: int) -> list[int]:
        """The last of the tokens that may be shown now, without making a copy of all."""
        held, leg = self.transcript.tokens, self.leg
        until = self._visible(leg) if leg is not None else 0
        new = leg.ids[max(0, until - most) : until] if leg is not None else []
        rest = most - len(new)
        return held[-rest:] + new if rest > 0 else new

    def _visible(self, leg: Leg) -> int:
        """Tokens of the leg that may be shown."""
        exact = self.request.pin.exact
        return leg.allowed(str(exact)) if exact else leg.placed

    def check_bounds(self, bounds: Bounds) -> None:
        """Refuse to run where the turn would end the engine.

        Raises:
            UnsafeTurn: it would.
            PromptTooLong: the prompt leaves no room for an answer.
        """
        if bounds != self.checked:
            request = self.request
            asked = request.prompt, request.sampling, request.passed
            check_within(*asked, bounds, request.highest)
            self.checked = bounds

    def check(self) -> None:
        """The promise of a finished turn.

        Raises:
            AssertionError: a token has no span or no log-prob of its own.
        """
        held = self.transcript
        count = len(held.tokens)
        whole = covers(held.spans, count)
        for values in held.per_token.values():
            if len(values) != count:
                whole = False
        if not whole:
            lengths = {name: len(values) for name, values in held.per_token.items()}
            message = f"turn {self.request.rid}: {count} tokens, {lengths}, {held.spans}"
            raise AssertionError(message)


def typed_abort(turn: Turn) -> None:
    """A turn that failed beside others that did not: an abort that says so, never just empty."""
    if turn.state is _FAILED and turn.finish is None:
        turn.finish = abort_of(turn.error or RuntimeError("the turn failed without saying why"))


def abort_of(error: Exception) -> dict[str, Any]:
    """An error as SGLang's finish reason of a turn that ended by it."""
    status, reason = 400, type(error).__name__
    if isinstance(error, RouterError):
        status, reason = error.status, error.reason
    return {"type": "abort", "message": str(error), "status_code": status, "err_type": reason}
