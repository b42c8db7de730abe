"""Takes what an engine says in answer to one leg: holds it, learns from it, tells who listens.

The client calls ``take`` in the moment in which a piece of the engine's stream arrives, without a
task in between, and ``streaming`` writes what follows from it to the caller in the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import methodcaller
from typing import Any

from rose_core.rollouts.requests.stops import Crossing
from rose_core.rollouts.transcripts.transcript import Leg, StreamEvent
from rose_router import metrics
from rose_router.engines.fleet import Clock, Engine, Fleet, LiveLeg
from rose_router.turns.turn import Turn

# Looked up once: finding a metric by its labels costs more than counting.
_COMPUTED, _CACHED, _FETCHED = map(metrics.PROMPT_TOKENS.labels, ("computed", "cached", "fetched"))
_PROMPT_META = ("prompt_tokens", "cached_tokens", "input_token_logprobs", "input_top_logprobs")


class LegReader:
    """Reads one leg.

    Args:
        turn: whose leg it is.
        engine: who answers.
        leg: what was said so far.
        handle: the leg as the supervisor watches it.
        fleet: learns how fast the engine works.
        clock: monotonic seconds.

    Attributes:
        wants_last_word: of the engine, also where a stop string ends the turn before it: experts of
            all tokens come with it.
    """

    def __init__(
        self, turn: Turn, engine: Engine, leg: Leg, handle: LiveLeg, *, fleet: Fleet, clock: Clock
    ) -> None:
        self._turn, self._engine, self._leg, self._handle = turn, engine, leg, handle
        self._fleet, self._clock = fleet, clock
        self._crossing = _crossing(turn)
        self._over = False
        wanted = turn.request.passed.get("return_routed_experts")
        self.wants_last_word = bool(wanted) and self._crossing is not None

    def take(self, events: Iterable[StreamEvent], halt: Callable[[], None] | None = None) -> bool:
        """Take events that came together; listeners are told once.

        Args:
            events: in their order.
            halt: has the engine say its last word, called where the turn ends before it; ``None`` =
                no more is wanted then.

        Returns:
            False when no more is wanted.

        Raises:
            BrokenStream: tokens are missing, or the engine counts backwards.
        """
        now, before, turn = self._clock(), self._leg.placed, self._turn
        try:
            for event in events:
                if not self._took(event, now, halt):
                    return False
        finally:
            if self._leg.placed > before:
                if turn.record.must_be_alone():
                    self._clear()
                if not turn.first_token_at:
                    turn.first_token_at = now
                    metrics.FIRST_TOKEN_SECONDS.observe(now - turn.began)
                turn.changed.fire()
        return True

    def _took(self, event: StreamEvent, now: float, halt: Callable[[], None] | None) -> bool:
        leg, handle = self._leg, self._handle
        if self._over:
            if event.finish is not None:
                leg.meta, leg.ended = event.meta, True
            return True
        new = leg.take(event)
        if self._turn.trace is not None and leg.spans:
            self._turn.trace.see_version(leg.spans[-1].version)
        self._learn(event, new, now)
        if self._engine.failures:
            self._engine.note_success()
        handle.last_event, handle.tokens = now, len(leg.ids)
        if leg.offset == 0:
            meta, kept = event.meta, self._turn.prompt_meta
            for name in _PROMPT_META:
                if name in meta:
                    kept[name] = meta[name]
        if self._crossing is None or not _stopped(leg, self._crossing):
            return True
        if halt is None or leg.ended:
            return False
        self._over = True
        halt()
        return True

    def _clear(self) -> None:
        """Tokens came where an engine had died before: others may run beside the turn again."""
        record = self._turn.record
        record.note_tokens(self._turn.held + self._leg.placed)
        if not record.must_be_alone():
            self._engine.solo = False
            self._fleet.changed.fire()

    def _learn(self, event: StreamEvent, new: int, now: float) -> None:
        engine, handle = self._engine, self._handle
        kind = engine.update.device_class
        uncached = event.meta.get("prompt_tokens", 0) - event.meta.get("cached_tokens", 0)
        if new and not handle.tokens:
            _count_prompt(event.meta, uncached)
        if new and kind:
            metrics.CLASS_TOKENS.labels(kind, "written").inc(new)
            if not handle.tokens:
                metrics.CLASS_TOKENS.labels(kind, "read").inc(max(0, uncached))
        if not new or engine.gate_since > handle.last_event:
            return  # the gap holds a pause of the gate
        if handle.tokens:
            step, live = (now - handle.last_event) / new, engine.occupied
            self._fleet.learn_speed(engine, methodcaller("saw_step", step, live=live))
            return
        waited = now - handle.began
        self._fleet.learn_speed(engine, methodcaller("saw_first_token", waited, uncached))


def _count_prompt(meta: Mapping[str, Any], uncached: int) -> None:
    """Where what an engine began with came from; it says so with its first token."""
    found = meta.get("cached_tokens", 0)
    fetched = (meta.get("cached_tokens_details") or {}).get("storage") or 0
    # Nothing is counted for nothing: each costs a lock.
    if uncached > 0:
        _COMPUTED.inc(uncached)
    if found > fetched:
        _CACHED.inc(found - fetched)
    if fetched:
        _FETCHED.inc(fetched)


def _crossing(turn: Turn) -> Crossing | None:
    """Who looks for stop strings that the next leg's engine cannot see whole."""
    stops = turn.request.stops
    return Crossing(stops, turn.transcript.tokens) if stops is not None and turn.held else None


def _stopped(leg: Leg, crossing: Crossing) -> bool:
    """Whether a stop string has ended the turn; the leg then ends with it."""
    found = crossing.match(leg.ids)
    if found is None or leg.placed < found.count:
        return False
    leg.end(found.count, found.finish)
    return True
