"""Every turn by the caller's id: live ones, and finished ones for a while.

A caller that lost its connection and asks again under the same id joins the live turn or gets the
finished answer; nothing is sampled twice. The same id with another body is refused while the first
is live, and is a new turn afterwards (some trainers use one id for all turns of a trajectory).
Turns that ended with an abort are not replayed: asking again means to try again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from prometheus_client import Counter

from rose_core.rollouts.trajectories.inclusion import Fate, TrajectoryOutcome
from rose_core.wire.routing import EngineKind
from rose_router import metrics
from rose_router.errors import BadRequest
from rose_router.turns.request import TurnRequest
from rose_router.turns.turn import Turn, TurnState

RECENT = 256
REPLAYABLE = 4096
_BORROWED = EngineKind.BORROWED  # named once: an enum's member is slow to find


@dataclass
class Totals:
    """Sums since the router started, for ``/turns``.

    Attributes:
        prompt_tokens: of turns that have ended.
        usual_tokens: output tokens of a turn, weighted to the last hundred or so.
        accepted: trajectories that the trainer said it trained on; ``correct``: correct answers
            among them.
        trained_tokens: output tokens of these trajectories; ``reasoning_tokens``: before answers.
    """

    turns: int = 0
    borrowed_turns: int = 0
    aborted_turns: int = 0
    failed_turns: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    borrowed_tokens: int = 0
    moves: int = 0
    redone_tokens: int = 0
    usual_tokens: float = 128.0
    accepted: int = 0
    correct: int = 0
    trained_tokens: int = 0
    reasoning_tokens: int = 0


class Ledger:
    """The turns.

    Args:
        replay_seconds: how long a finished turn answers its duplicate id.
    """

    def __init__(self, replay_seconds: float) -> None:
        self._replay_seconds = replay_seconds
        self._live: dict[tuple[str, str], Turn] = {}
        self._finished: OrderedDict[tuple[str, str], Turn] = OrderedDict()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.totals = Totals()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Turn]:
        return iter(list(self._live.values()))

    def find(self, request: TurnRequest, now: float) -> Turn | None:
        """The turn that this request is a duplicate of.

        Raises:
            BadRequest: a live turn has the id and another body.
        """
        if not request.own_rid:
            return None
        self._expire(now)
        live = self._live.get(request.name)
        if live is not None:
            if live.request.fingerprint() == request.fingerprint():
                return live
            message = (
                f"rid: {request.rid!r} belongs to a live turn with another body; give each turn an "
                "id of its own"
            )
            raise BadRequest("DuplicateId", message)
        finished = self._finished.get(request.name)
        if finished is None or finished.request.fingerprint() != request.fingerprint():
            return None
        return finished

    def live(self, rid: str, job: str = "") -> list[Turn]:
        """The live turns of that id, exact and never by prefix; of the job, or else of all."""
        exact = self._live.get((job, rid))
        if exact is not None or job:
            return [exact] if exact is not None else []
        return [turn for turn in self._live.values() if turn.request.rid == rid]

    def open(self, turn: Turn) -> None:
        """A turn begins."""
        self._live[turn.request.name] = turn

    def close(self, turn: Turn) -> None:
        """A turn has ended: count it, keep it for replay."""
        self._live.pop(turn.request.name, None)
        self._count(turn)
        self.recent.append(summary(turn))
        aborted = turn.finish is None or turn.finish.get("type") == "abort"
        if turn.request.own_rid and not aborted:
            self._finished[turn.request.name] = turn
            self._finished.move_to_end(turn.request.name)
            while len(self._finished) > REPLAYABLE:
                self._finished.popitem(last=False)

    def count_tokens(self, kind: EngineKind, count: int, run: str = "") -> None:
        """So many tokens of a turn are held that an engine of this kind made, for this run."""
        _tokens(kind).add(count)
        if run:
            _run_tokens(run).inc(count)
        self.totals.tokens += count
        self.totals.borrowed_tokens += count if kind is _BORROWED else 0

    def count_outcome(self, outcome: TrajectoryOutcome, *, correct: bool, reasoning: int) -> None:
        """The trainer has said what became of it; ``reasoning``: tokens before its answers."""
        if outcome.fate is not Fate.TRAINED:
            return
        self.totals.accepted += 1
        self.totals.correct += correct
        self.totals.trained_tokens += outcome.tokens
        self.totals.reasoning_tokens += min(max(0, reasoning), outcome.tokens)

    def _expire(self, now: float) -> None:
        limit = now - self._replay_seconds
        while self._finished and next(iter(self._finished.values())).ended < limit:
            self._finished.popitem(last=False)

    def _count(self, turn: Turn) -> None:
        totals, transcript = self.totals, turn.transcript
        finish = str(turn.finish["type"]) if turn.finish else "error"
        _turns("borrowed" if transcript.borrowed else "dedicated", finish).add(1)
        metrics.TURN_SECONDS.observe(turn.ended - turn.began)
        totals.turns += 1
        totals.prompt_tokens += len(transcript.prompt)
        totals.borrowed_turns += transcript.borrowed
        if finish in {"stop", "length"}:
            totals.usual_tokens += 0.02 * (len(transcript.tokens) - totals.usual_tokens)
        else:
            totals.failed_turns += turn.state is TurnState.FAILED
            totals.aborted_turns += finish == "abort"
        totals.moves += len(turn.moves)
        totals.redone_tokens += turn.redone_tokens


@cache
def _tokens(kind: EngineKind) -> metrics.SeriesTally:
    """Looked up once: finding a metric by its labels costs more than counting."""
    return metrics.TOKENS.tally(kind.value.lower())


@lru_cache(64)
def _run_tokens(run: str) -> Counter:
    return metrics.RUN_TOKENS.labels(run)


@cache
def _turns(kind: str, finish: str) -> metrics.SeriesTally:
    return metrics.TURNS.tally(kind, finish)


def summary(turn: Turn) -> dict[str, Any]:
    """A turn in a few words, for ``/turns``."""
    transcript, leg = turn.transcript, turn.leg
    legs, spans = transcript.legs, transcript.spans
    # Made of every turn that ends, which usually has one of each: no calls for lists.
    engines = [legs[0].engine] if len(legs) == 1 else [one.engine for one in legs]
    if leg is not None:
        engines.append(leg.engine)
    return {
        "id": turn.request.rid,
        "session": turn.request.session,
        "job": turn.request.job,
        "state": turn.state,
        "kind": "borrowed" if transcript.borrowed else "dedicated",
        "engines": engines,
        "prompt_tokens": len(transcript.prompt),
        "tokens": len(transcript.tokens) + (leg.placed if leg is not None else 0),
        "versions": [spans[0].version] if len(spans) == 1 else [one.version for one in spans],
        "moves": turn.moves
        and [{"reason": m.reason.value, "at_token": m.at_token} for m in turn.moves],
        "redone_tokens": turn.redone_tokens,
        "finish": turn.finish["type"] if turn.finish else None,
        "error": str(turn.error) if turn.error else "",
        "queue_seconds": turn.queue_seconds and round(turn.queue_seconds, 4),
        "seconds": turn.ended - turn.began if turn.ended else None,
    }
