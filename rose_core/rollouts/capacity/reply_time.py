"""When the reply to a turn is expected, and how far that may be trusted.

Sandbox hosts save and suspend while the model thinks (``rose_core.sandboxes.policy``), so they are
told how long that will be. What is expected is the sum of what stands before the last token:

| part | known from |
|---|---|
| every gate is shut | how long it has been: as long again |
| the queue | turns before this one, and how fast turns end |
| prefill | tokens of the context that its home has no keys for, and the engine's speed |
| decode | tokens that are expected, and the engine's step with one turn more |

``Trust`` compares what was expected with what came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rose_core.rollouts.placement.views import EngineView, TurnView

REMEMBERED = 256
"""Replies that trust rests on: a few steps of a trainer's batch."""
ENOUGH = 16
"""Replies below which nothing is known: half of them are then said to take at least as long."""


@dataclass(frozen=True)
class Queue:
    """What stands before a turn that has come.

    Attributes:
        waiting: turns that wait for an engine.
        ends_per_second: turns that end; 0 = not known.
        shut_seconds: since the last gate closed; 0 while one is open.
    """

    waiting: int = 0
    ends_per_second: float = 0.0
    shut_seconds: float = 0.0


def reply_seconds(turn: TurnView, engines: Sequence[EngineView], queue: Queue) -> float | None:
    """Seconds until the last token of a turn that has just come; None: no engine could take it.

    Args:
        turn: as placement sees it.
        engines: of the lease.
        queue: what stands before it.
    """
    able = [one for one in engines if one.version is not None and not one.leaving]
    if not able:
        return None
    opened = [one for one in able if one.gate_open]
    engine = _likely_engine(turn, opened or able)
    cached = turn.cached if engine.name == turn.home else 0
    prefill = max(0, turn.context - cached) * engine.speed.prefill_seconds_per_token
    running = prefill + turn.expected * engine.speed.step_at(engine.live + 1)
    places = sum(max(0, one.cap - one.live) for one in opened)
    before = max(0, queue.waiting + 1 - places)
    # Where nobody knows how fast turns end, those before this one take as long as it does.
    waiting = before / queue.ends_per_second if queue.ends_per_second > 0 else before * running
    return queue.shut_seconds + (waiting if opened else 0.0) + running


def _likely_engine(turn: TurnView, among: Sequence[EngineView]) -> EngineView:
    """The turn's home, else the one with most room."""
    home = next((one for one in among if one.name == turn.home), None)
    return home or min(among, key=lambda one: (one.live / max(one.cap, 1), one.name))


@dataclass
class Trust:
    """How often a reply has taken at least as long as was expected."""

    _held: deque[bool] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note(self, expected: float, took: float) -> None:
        """A reply has come, ``took`` seconds after its turn."""
        self._held.append(took >= expected)

    @property
    def confidence(self) -> float:
        """0 to 1, that the next one takes at least as long as expected."""
        if len(self._held) < ENOUGH:
            return 0.5
        return sum(self._held) / len(self._held)
