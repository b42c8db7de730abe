"""When a trainer will send turns again, learned from when it did: steps have a rhythm.

A training run alternates: turns (generating), then none (training), a publish, turns again. The
router sees turns and publishes and nothing else of the trainer, so the phase is what these say:

| phase | seen |
|---|---|
| Generating | a turn is under way or waits, or one ended less than ``PAUSE_SECONDS`` ago |
| Training | none for longer, and the trainer is not late |
| Silent | none, and late: for ``LATE`` times its longest pause, or ten minutes if none is known |
| Unknown | there was no turn yet |

The next turns are expected after the shorter quartile of the last pauses: too early costs an idle
engine a few seconds, too late a step. A pause between two tool calls is none: it is shorter than
``PAUSE_SECONDS``. Pure; ``observe`` is called now and then (the router does once a second), and
``note`` is the report to a listener: production's router and the simulator's both call it. Next
step: ``rose_core.lending.demand`` makes slots of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Protocol

from rose_core.identity import is_base
from rose_core.wire.routing import DemandNote, EngineKind

LOOK_SECONDS = 1.0
"""Between two looks at the queue; the planner's passes are about as far apart."""
REPORT_SECONDS = 10.0
"""An unchanged note is repeated so often; the planner takes a router for deaf after a minute."""
PAUSE_SECONDS = 15.0
"""A pause between two tool calls is shorter; a training step is rarely."""
LATE = 1.5
"""Times its longest pause: steps differ, a crash lasts."""
_UNKNOWN_LATE_SECONDS = 600.0  # of a trainer never seen to pause: most steps are shorter
_KEPT = 8
"""Pauses and peaks remembered: the last hour of a job with steps of minutes."""
PEAK_SECONDS = 60.0
"""How long a peak counts: turns of one step come and go within it, steps do not."""


class TrainerPhase(StrEnum):
    """What the trainer does, as far as its turns and publishes tell."""

    GENERATING = "Generating"
    TRAINING = "Training"
    SILENT = "Silent"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Rhythm:
    """What has been seen of one trainer; times are seconds of one clock.

    Attributes:
        turn_at: when a turn was last seen.
        published_at: when the newest version was first heard of, after the first.
        head: the newest version.
        peak: most turns at once in that stretch.
        recent: (when, turns), falling, of the last ``PEAK_SECONDS``.
        pauses, peaks: of the last stretches, oldest first.
    """

    turn_at: float | None = None
    published_at: float | None = None
    head: str = ""
    peak: int = 0
    recent: tuple[tuple[float, int], ...] = ()
    pauses: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()

    def phase(self, now: float) -> TrainerPhase:
        """The module's table."""
        idle = self.idle_seconds(now)
        if idle is None:
            return TrainerPhase.UNKNOWN
        if idle < PAUSE_SECONDS:
            return TrainerPhase.GENERATING
        late = LATE * max(self.pauses) if self.pauses else _UNKNOWN_LATE_SECONDS
        return TrainerPhase.SILENT if idle > max(late, PAUSE_SECONDS) else TrainerPhase.TRAINING

    def idle_seconds(self, now: float) -> float | None:
        """Time since the last turn; None before the first."""
        return None if self.turn_at is None else max(0.0, now - self.turn_at)

    def expected_seconds(self, now: float) -> float | None:
        """Time until turns are expected, 0 when they are due; None when nothing says.

        That is while there are some, before a pause was seen, and when the trainer is so late that
        its rhythm says nothing any more.
        """
        idle = self.idle_seconds(now)
        if idle is None or not self.pauses or self.phase(now) is not TrainerPhase.TRAINING:
            return None
        return max(0.0, sorted(self.pauses)[len(self.pauses) // 4] - idle)

    def most(self, now: float) -> int:
        """Most turns at once in the last ``PEAK_SECONDS``."""
        return max((turns for at, turns in self.recent if now - at <= PEAK_SECONDS), default=0)

    @property
    def usual(self) -> int:
        """Most turns at once in a usual stretch; 0 before the first."""
        return round(median(self.peaks)) if self.peaks else self.peak

    @property
    def published(self) -> bool:
        """Whether a version came after the last turn: the next step is about to begin."""
        return self.published_at is not None and self.published_at > (self.turn_at or 0.0)


def observe(rhythm: Rhythm, turns: int, head: str, now: float) -> Rhythm:
    """What is known after a look: so many turns are live or waiting, that is the newest version."""
    if head and head != rhythm.head:
        # The first version says when the router began to listen, and not what the trainer does.
        # A version 0 never says anything of the trainer: nobody has published it.
        news = now if rhythm.head and not is_base(head) else rhythm.published_at
        rhythm = replace(rhythm, head=head, published_at=news)
    if not turns:
        return rhythm
    idle = rhythm.idle_seconds(now)
    if idle is not None and idle >= PAUSE_SECONDS:
        rhythm = replace(
            rhythm,
            peak=0,
            pauses=(*rhythm.pauses, idle)[-_KEPT:],
            peaks=(*rhythm.peaks, rhythm.peak)[-_KEPT:],
        )
    # Monotonic deque: what is older and not above the newest can never be the most again.
    older = tuple(
        (at, seen) for at, seen in rhythm.recent if seen > turns and now - at <= PEAK_SECONDS
    )
    return replace(rhythm, turn_at=now, peak=max(rhythm.peak, turns), recent=(*older, (now, turns)))


class Capacity(Protocol):
    """The part of an attached engine that says how many turns it carries."""

    @property
    def kind(self) -> EngineKind:
        """Whether the engine is dedicated or borrowed."""

    @property
    def gate_open(self) -> bool:
        """Whether it computes now."""

    @property
    def cap(self) -> int:
        """Most turns at a time."""


@dataclass(frozen=True)
class TurnTraffic:
    """A router's turns at one moment.

    Attributes:
        turns: live and waiting.
        waiting_tokens: prompt and output tokens of those that wait.
        dedicated_turns: turns that the open dedicated engines carry half full.
    """

    turns: int
    waiting_tokens: int = 0
    dedicated_turns: int = 0


def half_full(engines: Iterable[Capacity]) -> int:
    """Turns that the open dedicated engines carry when each is half full."""
    return sum(
        engine.cap // 2
        for engine in engines
        if engine.kind is EngineKind.DEDICATED and engine.gate_open
    )


def note(rhythm: Rhythm, seen: TurnTraffic, up_seconds: float, now: float) -> DemandNote:
    """What a listener is told after a look at the turns; ``up_seconds`` is the router's age."""
    published = rhythm.published_at if rhythm.published else None
    return DemandNote(
        waiting_tokens=seen.waiting_tokens,
        peak_turns=max(seen.turns, rhythm.most(now)),
        usual_turns=rhythm.usual,
        dedicated_turns=seen.dedicated_turns,
        phase=rhythm.phase(now).value,
        idle_seconds=0.0 if seen.turns else rhythm.idle_seconds(now),
        published_seconds=None if published is None else now - published,
        expected_seconds=rhythm.expected_seconds(now),
        up_seconds=up_seconds,
    )


def key(rhythm: Rhythm, turns: int) -> object:
    """Another one is worth saying at once: turns that come or go, and not each of a thousand."""
    return turns.bit_length(), rhythm.usual, rhythm.published_at
