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
    """How often an engine's gate closes while it is open, forgetting with ``memory_seconds``.

    The prior is half a closing in one memory: an engine that was never seen closed is not immortal.
    """

    closings: float = 0.5
    open_seconds: float = 300.0
    memory_seconds: float = 300.0

    def was_open(self, seconds: float) -> Hazard:
        """The gate stayed open for so long."""
        fade = math.exp(-max(0.0, seconds) / self.memory_seconds)
        return replace(
            self,
            closings=self.closings * fade,
            open_seconds=self.open_seconds * fade + max(0.0, seconds),
        )

    def closed(self) -> Hazard:
        """The gate closed."""
        return replace(self, closings=self.closings + 1)

    @property
    def per_second(self) -> float:
        """Expected closings per open second."""
        return self.closings / max(self.open_seconds, 1.0)
