"""What placement sees of turns and engines, its knobs, and its answers.

Every field that a caller may leave out has a default that asks for nothing. Views are made anew for
every choice, so they are msgspec's structs: a frozen dataclass costs ten times as much to make.
Next: ``placement``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import msgspec

from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.estimates import Hazard, Speed
from rose_core.rollouts.versions import NO_PIN, Pin
from rose_core.wire.routing import EngineKind


class Obstacle(IntEnum):
    """Why an engine cannot take a turn now; a larger number is nearer to being able to."""

    NO_ENGINE = 0
    LEAVING = 1
    DEDICATED_ONLY = 2
    NOT_TAKEN = 3
    LOST_IT = 4
    UNATTESTED = 5
    PINNED = 6
    STALE = 7
    GATE_CLOSED = 8
    BACKING_OFF = 9
    FENCING = 10
    FULL = 11

    @property
    def reason(self) -> str:
        """The word used in replies and metrics."""
        return self.name.title().replace("_", "")


class EngineView(msgspec.Struct, frozen=True, gc=False):
    """An engine as placement sees it.

    Attributes:
        version: attested on its live weights; ``None`` when there is none.
        live: turns in flight there, by the router's own count.
        fencing: aborts of old legs that it has not taken yet; no turn before that.
        kept: it is kept for, or runs, a turn that must be alone (``suspects``).
        backing_off_until: after a refusal or a loss, in seconds of the router's clock.
        head: newest version of its run, where that is not the lease's first.
        named: it takes only turns that name its run.
        refuses: parameters that it does not take.
        slowdown: how many times slower serving is while a borrowed one computes, as its guard has
            measured; 0 = nobody has.
    """

    name: str
    kind: EngineKind
    version: WeightVersion | None
    gate_open: bool
    cap: int
    live: int = 0
    leaving: bool = False
    fencing: bool = False
    kept: bool = False
    backing_off_until: float = 0.0
    speed: Speed = msgspec.field(default_factory=Speed)
    hazard: Hazard = msgspec.field(default_factory=Hazard)
    head: WeightVersion | None = None
    named: bool = False
    refuses: tuple[str, ...] = ()
    slowdown: float = 0.0


class TurnView(msgspec.Struct, frozen=True, gc=False):
    """A turn as placement sees it.

    Attributes:
        context: tokens the engine must have keys for: prompt and held output.
        expected: output tokens still to come.
        home: engine of the session's last turn, which has ``cached`` tokens of the context.
        avoid: engines that this turn has just lost or that did not answer it.
        losses: engines this turn has lost so far.
        since_move: turns of the session since it last left a home by choice.
        rest_tokens, tail_tokens: output the whole trajectory still makes, median and 9th decile;
            0 = no idea.
        budget_seconds: time left until the trajectory is too old to train on.
        begins: the first turn of its trajectory.
        stratum: group of trajectories that ought to meet borrowed engines equally often; empty =
            not counted.
        tail: likely to be among the last of its batch.
        alone: it may have ended an engine: no other turn may run beside it.
        from_version: tokens of an older version would make the trajectory too old sooner; None =
            no bound of age, or nothing known.
        asked: parameters of it that some engine refuses (``fields.asked_with``).
    """

    context: int
    expected: int
    pin: Pin = NO_PIN
    dedicated_only: bool = False
    home: str = ""
    cached: int = 0
    avoid: frozenset[str] = frozenset()
    losses: int = 0
    since_move: int = 1_000_000
    rest_tokens: float = 0.0
    tail_tokens: float = 0.0
    budget_seconds: float = math.inf
    begins: bool = False
    stratum: str = ""
    tail: bool = False
    from_version: WeightVersion | None = None
    alone: bool = False
    control: bool = False
    asked: frozenset[str] = frozenset()

    @property
    def placement_key(self) -> tuple[object, ...]:
        """Where no engine takes one turn, none is likely to take another of the same."""
        run_on = (self.dedicated_only, self.pin, self.avoid, self.losses, self.alone, self.asked)
        left = max(-1.0, min(self.budget_seconds, 600.0) // 30)
        return (
            *run_on,
            self.begins,
            self.tail,
            self.stratum,
            left,
            self.from_version,
            self.control,
        )


class PolicyName(StrEnum):
    """How an engine is chosen among those that pass every filter; ``selection`` has the rules."""

    JOINT = "joint"
    ROSE_PAPER = "rose-paper"
    ROSE_PAPER_DEDICATED = "rose-paper-dedicated"
    CACHE_AWARE = "cache-aware"
    LEAST_LOADED = "least-loaded"
    FIXED = "fixed"
    LONG_TO_BORROWED = "long-to-borrowed"
    LATE_TO_BORROWED = "late-to-borrowed"


BIASED = frozenset({PolicyName.LONG_TO_BORROWED, PolicyName.LATE_TO_BORROWED})
"""Rules that bias training by what they do; benchmarks compare with them, no lease may ask."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Knobs of placement.

    Attributes:
        max_staleness: publishes an engine may lag behind the newest version known.
        pause_seconds: what a reclaim costs a turn beside its re-prefill.
        crowding_seconds: added for an engine that is full, in proportion below.
        move_margin: a session leaves home when it gains this share of the re-prefill on top.
        name: the rule; what follows belongs to ``joint``.
        move_every: turns of a session between two moves by choice.
        horizon_tokens: output of later turns that the choice of an engine looks ahead to.
        lent_weight: seconds of cost per second for which a lent GPU computes more, where serving
            is twice as slow beside it: its requests meet that. Elsewhere times ``slowdown`` - 1.
        late_weight: seconds of cost per second that a trajectory is expected to be late.
        quota: the borrowed share of a stratum stays this close to that of all turns.
        reserve: share of dedicated places kept for the tail while a borrowed engine has room.
        losses: engines a turn may lose before it runs on dedicated ones while there are any.
        explore: share of beginning trajectories that are placed at random, so that what is
            learned of engines does not only come from where they were expected to be good.
        control: share of groups that run on dedicated engines alone while there are any, so that
            ``inclusion`` can say what borrowing does to the others.
    """

    max_staleness: int = 1
    pause_seconds: float = 2.0
    crowding_seconds: float = 0.5
    move_margin: float = 0.5
    name: PolicyName = PolicyName.JOINT
    move_every: int = 4
    horizon_tokens: float = 2000.0
    lent_weight: float = 2.0
    late_weight: float = 1.0
    quota: float = 0.2
    reserve: float = 0.125
    losses: int = 3
    explore: float = 0.02
    control: float = 0.05


class Placement(msgspec.Struct, frozen=True, gc=False):
    """Send the turn here."""

    engine: str


class Wait(msgspec.Struct, frozen=True, gc=False):
    """No engine can take the turn now; ``obstacle`` is the least one of any engine."""

    obstacle: Obstacle
