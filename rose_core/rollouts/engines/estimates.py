"""Speed of an engine and how often it is taken back, from what the router saw itself.

Figures an engine publishes lag by its reporting period and send bursts of turns to one place, so
placement uses the router's own counts. Exponentially weighted moving averages (EWMA); a fresh
engine starts from the prior, so nothing is ever divided by zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec

_LEAST_MOVE = 0.5  # of turns in flight; a smaller change says nothing about what a turn costs
_SLOPE_WEIGHT = 0.05
_WEIGHT = 0.1
SAME_STEP = 0.5
"""Of a step: turns of a batch end it together, and what a router hears of it is that far apart at
most."""


def weight_of(lessons: int) -> float:
    """The weight of one lesson that stands for so many alike."""
    return 1.0 - (1.0 - _WEIGHT) ** lessons


class Speed(msgspec.Struct, frozen=True, gc=False):
    """How fast an engine works.

    A step takes longer the more turns share it, and an engine that has emptied shows no step at
    all, so the last one seen is carried to another load by what steps did when the load changed.

    Attributes:
        step_seconds: time between two tokens of one turn, at ``usual_live`` turns.
        prefill_seconds_per_token: time per prompt token that is not cached.
        usual_live: turns in flight when steps were seen; 0 = never said.
        spread, joint: weighted means of (change of load)^2 and (change of load) x (of step).
    """

    step_seconds: float = 0.02
    prefill_seconds_per_token: float = 0.0001
    usual_live: float = 0.0
    spread: float = 0.0
    joint: float = 0.0

    @property
    def per_turn_seconds(self) -> float:
        """By how much one more turn lengthens the step of all."""
        return max(0.0, self.joint / self.spread) if self.spread else 0.0

    def step_at(self, live: int) -> float:
        """Step with so many turns in flight; never below a quarter of what was seen."""
        away = self.per_turn_seconds * (live - self.usual_live)
        return max(self.step_seconds / 4, self.step_seconds + away)

    def teaches(self, since: float) -> bool:
        """Whether a gap that is seen so long after the last one tells of another step.

        All turns of a batch show each of its steps, at once: one of them says it for all.
        """
        return since >= SAME_STEP * self.step_seconds

    def saw_step(self, seconds_per_token: float, weight: float = _WEIGHT, live: int = 0) -> Speed:
        """Learn from the gap between two events of a stream; ``live`` 0 = not said."""
        change = seconds_per_token - self.step_seconds
        usual, spread, joint = self.usual_live, self.spread, self.joint
        if live and not usual:
            usual = float(live)
        elif live:
            more = live - usual
            usual += weight * more
            if abs(more) >= _LEAST_MOVE:
                spread += _SLOPE_WEIGHT * (more * more - spread)
                joint += _SLOPE_WEIGHT * (more * change - joint)
        # Made for every step: a dataclass would cost more than reading an event.
        step = self.step_seconds + weight * change
        return Speed(step, self.prefill_seconds_per_token, usual, spread, joint)

    def saw_first_token(
        self, seconds: float, uncached_tokens: int, weight: float = _WEIGHT
    ) -> Speed:
        """Learn from the time to the first token; short prompts say little and are left out."""
        if uncached_tokens < 32:
            return self
        old = self.prefill_seconds_per_token
        new = old + weight * (seconds / uncached_tokens - old)
        return Speed(self.step_seconds, new, self.usual_live, self.spread, self.joint)


@dataclass(frozen=True, slots=True)
class Hazard:
    """How much of the time an engine's gate is open, and how often it is taken back for long.

    Short closings only stretch a turn; a *reclaim* (the engine died, or stayed closed so long that
    turns moved) makes another engine prefill its context again. Both are forgotten with
    ``memory_seconds``. The prior is one tenth of a reclaim in one memory of open time: an engine
    that was never seen to go is not immortal.
    """

    reclaims: float = 0.1
    open_seconds: float = 300.0
    closed_seconds: float = 0.0
    memory_seconds: float = 300.0

    def passed(self, seconds: float, *, is_open: bool, reclaimed: bool = False) -> Hazard:
        """So much time has passed with the gate open or closed.

        Args:
            seconds: since the gate last moved.
            is_open: where it stood during that time.
            reclaimed: the engine was lost to its turns in that time.
        """
        seconds = max(0.0, seconds)
        fade = math.exp(-seconds / self.memory_seconds)
        return replace(
            self,
            reclaims=self.reclaims * fade + reclaimed,
            open_seconds=self.open_seconds * fade + (seconds if is_open else 0.0),
            closed_seconds=self.closed_seconds * fade + (0.0 if is_open else seconds),
        )

    @property
    def open_share(self) -> float:
        """Share of the time that the gate is open; at least one hundredth."""
        total = self.open_seconds + self.closed_seconds
        return max(0.01, self.open_seconds / total) if total else 1.0

    @property
    def per_second(self) -> float:
        """Expected reclaims per second."""
        return self.reclaims / max(self.open_seconds + self.closed_seconds, 1.0)
