"""What the planner hears of every job's turns, on virtual time: router's side and operator's.

Production's router looks at its turns once a second and tells the operator at once what is worth
saying at once, and the rest every ten seconds; the operator puts together what it heard. Both
halves are the core's (``rollouts.training.rhythm``, ``lending.demand``); here is only the clock
between them. Next step: ``planner`` gives it to ``lending.plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rose_core.lending import Demand
from rose_core.lending.demand import ReceivedNote, together
from rose_core.rollouts.training.rhythm import (
    LOOK_SECONDS,
    REPORT_SECONDS,
    Rhythm,
    TurnTraffic,
    half_full,
    key,
    note,
    observe,
)
from rose_simulate.model.clock import VirtualClock
from rose_simulate.model.routing.router import Router


@dataclass
class _Line:
    """One router's: what was seen of it, what it said last and when."""

    rhythm: Rhythm = field(default_factory=Rhythm)
    sent: object = None
    received: ReceivedNote | None = None


class SimulatedDemands:
    """The routers' last words."""

    def __init__(self, clock: VirtualClock, routers: Mapping[str, Router]) -> None:
        self._clock, self._routers = clock, routers
        self._lines = {name: _Line() for name in routers}

    def of(self, job: str) -> Demand | None:
        """What the job's router says; None before it was heard."""
        received = self._lines[job].received
        return together([] if received is None else [received], self._clock.now_s)

    def run(self, wake: Callable[[], None]) -> None:
        """Look at the turns now and every second.

        Args:
            wake: called when a job begins to have turns, or no longer has any.
        """
        woken = [self._look(router, self._lines[name]) for name, router in self._routers.items()]
        if any(woken):
            wake()
        self._clock.after(LOOK_SECONDS, lambda: self.run(wake))

    def _look(self, router: Router, line: _Line) -> bool:
        """One look; whether it changes if the job has turns."""
        now, seen = self._clock.now_s, traffic(router)
        line.rhythm = observe(line.rhythm, seen.turns, router.newest, now)
        worth, before = key(line.rhythm, seen.turns), line.received
        if before is not None and worth == line.sent and now - before.at < REPORT_SECONDS:
            return False
        line.sent = worth
        line.received = ReceivedNote(note(line.rhythm, seen, now, now), now)
        return before is None or bool(before.note.peak_turns) != bool(line.received.note.peak_turns)


def traffic(router: Router) -> TurnTraffic:
    """A router's turns now, as production's router counts its own."""
    return TurnTraffic(
        router.inside,
        sum(turn.context + turn.output for turn in router.waiting),
        half_full(router.engines.values()),
    )
