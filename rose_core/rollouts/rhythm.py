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
``PAUSE_SECONDS``. Pure; ``observe`` is called now and then (the router does once a second). Next
step: ``rose_core.lending.demand`` makes slots of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

PAUSE_SECONDS = 15.0
LATE = 1.5
_UNKNOWN_LATE_SECONDS = 600.0
_KEPT = 8
"""Pauses and peaks remembered: the last hour of a job with steps of minutes."""
PEAK_SECONDS = 60.0
"""How long a peak counts: turns of one step come and go within it, steps do not."""


class Phase(StrEnum):
    """What the trainer does, as far as its turns and publishes tell."""

    GENERATING = "Generating"
    TRAINING = "Training"
    SILENT = "Silent"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Rhythm:
    """What has been seen of one trainer; times are seconds of one clock.

    Attributes:
        began_at: when the present or last stretch of turns began, None before the first.
        turn_at: when a turn was last seen.
        published_at: when the newest version was first heard of, after the first.
        head: the newest version.
        peak: most turns at once in that stretch.
        recent: (when, turns), falling, of the last ``PEAK_SECONDS``.
        pauses, peaks: of the last stretches, oldest first.
    """

    began_at: float | None = None
    turn_at: float | None = None
    published_at: float | None = None
    head: str = ""
    peak: int = 0
    recent: tuple[tuple[float, int], ...] = ()
    pauses: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()

    def phase(self, now: float) -> Phase:
        """The module's table."""
        idle = self.idle_seconds(now)
        if idle is None:
            return Phase.UNKNOWN
        if idle < PAUSE_SECONDS:
            return Phase.GENERATING
        late = LATE * max(self.pauses) if self.pauses else _UNKNOWN_LATE_SECONDS
        return Phase.SILENT if idle > max(late, PAUSE_SECONDS) else Phase.TRAINING

    def idle_seconds(self, now: float) -> float | None:
        """Time since the last turn; None before the first."""
        return None if self.turn_at is None else max(0.0, now - self.turn_at)

    def expected_seconds(self, now: float) -> float | None:
        """Time until turns are expected, 0 when they are due; None when nothing says.

        That is while there are some, before a pause was seen, and when the trainer is so late that
        its rhythm says nothing any more.
        """
        idle = self.idle_seconds(now)
        if idle is None or not self.pauses or self.phase(now) is not Phase.TRAINING:
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
        news = now if rhythm.head else rhythm.published_at
        rhythm = replace(rhythm, head=head, published_at=news)
    if not turns:
        return rhythm
    idle = rhythm.idle_seconds(now)
    if idle is None:
        rhythm = replace(rhythm, began_at=now)
    elif idle >= PAUSE_SECONDS:
        rhythm = replace(
            rhythm,
            began_at=now,
            peak=0,
            pauses=(*rhythm.pauses, idle)[-_KEPT:],
            peaks=(*rhythm.peaks, rhythm.peak)[-_KEPT:],
        )
    # Monotonic deque: what is older and not above the newest can never be the most again.
    older = tuple(
        (at, seen) for at, seen in rhythm.recent if seen > turns and now - at <= PEAK_SECONDS
    )
    return replace(rhythm, turn_at=now, peak=max(rhythm.peak, turns), recent=(*older, (now, turns)))
