"""Whether everything in flight would still be in time if every borrowed engine vanished now.

Load bursts hit all replicas of a service at once, so borrowed engines do not leave one by one. A
trajectory is only begun on one of them while the dedicated engines could finish what is in flight,
contexts prefilled anew, before it is too old: earliest deadline first (Liu and Layland, 1973),
places as one fluid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rose_core.rollouts.views import EngineView
from rose_core.wire.routing import EngineKind


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """What a trajectory in flight still needs.

    Attributes:
        context: tokens to prefill on its next engine.
        rest_tokens: output it still makes, its median.
        budget_seconds: time left until it is too old; infinite = no bound.
    """

    context: int
    rest_tokens: float
    budget_seconds: float


def survives(work: Iterable[RemainingWork], engines: Sequence[EngineView]) -> bool:
    """Whether the dedicated engines alone would finish the work in time; without any: no."""
    ours = [engine for engine in engines if engine.kind is EngineKind.DEDICATED and engine.cap]
    if not ours:
        return False
    places = sum(engine.cap for engine in ours)
    step = sum(engine.speed.step_seconds * engine.cap for engine in ours) / places
    prefill = sum(engine.speed.prefill_seconds_per_token for engine in ours) / len(ours)
    taken = 0.0
    for one in sorted(work, key=lambda one: one.budget_seconds):
        alone = one.context * prefill + one.rest_tokens * step
        # One prefill occupies its whole engine, decoding one of its places.
        taken += one.context * prefill / len(ours) + one.rest_tokens * step / places
        if max(alone, taken) > one.budget_seconds:
            return False
    return True
