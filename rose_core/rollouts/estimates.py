"""Speed of an engine and how often it is taken back, from what the router saw itself.

Figures an engine publishes lag by its reporting period and send bursts of turns to one place, so
placement uses the router's own counts. Exponentially weighted; a fresh engine starts from the
prior, so nothing is ever divided by zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast an engine works.

    Attributes:
        step_seconds: time between two tokens of one turn.
        prefill_seconds_per_token: time per prompt token that is not cached.
    """

    step_seconds: float = 0.02
    prefill_seconds_per_token: float = 0.0001

    def saw_step(self, seconds_per_token: float, weight: float = 0.1) -> Speed:
        """Learn from the gap between two events of a stream."""
        step = self.step_seconds + weight * (seconds_per_token - self.step_seconds)
        return replace(self, step_seconds=step)

    def saw_first_token(self, seconds: float, uncached_tokens: int, weight: float = 0.1) -> Speed:
        """Learn from the time to the first token; short prompts say little and are left out."""
        if uncached_tokens < 32:
            return self
        old = self.prefill_seconds_per_token
        new = old + weight * (seconds / uncached_tokens - old)
        return replace(self, prefill_seconds_per_token=new)


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
