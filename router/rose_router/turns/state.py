"""What all that moves turns works on: a lease's engines, its queue, the memory of its turns.

Made once, before anybody who uses it: ``service`` gives it to the runner, the warmer and the
supervisor, which know nothing of each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rose_core.rollouts.conversations.prefixes import Prefixes
from rose_core.rollouts.placement.guards import RolloutOutlook
from rose_router.config import Settings
from rose_router.engines.engine_client import EngineClient
from rose_router.engines.fences import Fences
from rose_router.engines.fleet import Clock, Fleet
from rose_router.turns.ledger import Ledger
from rose_router.turns.sessions import Sessions
from rose_router.turns.turn_queue import TurnQueue

_MOST_ENDS = 64


class FinishRate:
    """How many turns have ended in a second lately.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)

    def note_end(self, now: float) -> None:
        """A turn has ended."""
        self._ends.append(now)

    def per_second(self) -> float:
        """Over the last of them; 0 before there are two."""
        if len(self._ends) < 2:
            return 0.0
        return len(self._ends) / max(self._clock() - self._ends[0], 0.001)


@dataclass(frozen=True)
class RouterPorts:
    """What a router does not decide itself.

    Attributes:
        client: reaches engines.
        clock: monotonic seconds.
        new_rid: makes ids of legs, all of one length, as engines match them by prefix.
        dice: random numbers from 0 to 1, for exploration.
    """

    client: EngineClient
    clock: Clock
    new_rid: Callable[[], str]
    dice: Callable[[], float]


class RouterParts:
    """Engines, queue and memory of one lease.

    Args:
        settings: knobs.
        outside: engines, time and chance.

    Attributes:
        fleet: the engines.
        fences: aborts that engines have not taken yet.
        ledger: live turns and finished ones.
        prospects: memory of trajectories.
        prefixes: what trajectories without a key have left behind.
        sessions: where trajectories have their homes.
        finished: how fast turns end.
        queue: of turns that wait for an engine.
    """

    def __init__(self, settings: Settings, outside: RouterPorts) -> None:
        self.settings, self.outside = settings, outside
        self.clock, policies = outside.clock, settings.policies
        self.fleet = Fleet(self.clock, policies.patience.pause_seconds)
        self.fences = Fences(self.fleet, outside.client)
        self.ledger = Ledger(settings.replay_seconds)
        self.prospects = policies.memory()
        self.prefixes = Prefixes()
        self.sessions = Sessions()
        self.finished = FinishRate(self.clock)
        self.queue = TurnQueue(
            self.fleet,
            policies.placement,
            settings.queue,
            self.clock,
            outlook=self.outlook,
            finish_rate=self.finished.per_second,
        )

    def outlook(self) -> RolloutOutlook:
        """What is known of all trajectories together, with a throw of the dice."""
        return self.prospects.outlook(self.fleet.processes, self.outside.dice(), self.clock())
