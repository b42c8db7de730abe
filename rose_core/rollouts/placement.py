"""One engine for one turn: hard filters first, then the least expected cost in seconds.

    cost(e) = T_e                            prefill of what e has not cached, decode, short pauses
            + (1 - exp(-h_e T_e)) * (loss)   risk that e is taken back during the turn
            + crowding * live/cap            spreads equal engines

``T_e`` holds the price of leaving the session's home (its cached prefix), so affinity is not a rule
of its own; a move must in addition gain a margin (hysteresis). Numbers come from ``estimates``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from rose_core.identity import WeightVersion
from rose_core.rollouts.estimates import Hazard, Speed
from rose_core.rollouts.versions import NO_PIN, Pin, fresh, satisfies
from rose_core.wire.routing import EngineKind


class Obstacle(IntEnum):
    """Why an engine cannot take a turn now; a larger number is nearer to being able to."""

    NO_ENGINE = 0
    LEAVING = 1
    DEDICATED_ONLY = 2
    LOST_IT = 3
    UNATTESTED = 4
    PINNED = 5
    STALE = 6
    GATE_CLOSED = 7
    BACKING_OFF = 8
    FENCING = 9
    FULL = 10

    @property
    def reason(self) -> str:
        """The word used in replies and metrics."""
        return self.name.title().replace("_", "")


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as placement sees it.

    Attributes:
        version: attested on its live weights; ``None`` when there is none.
        live: turns in flight there, by the router's own count.
        fencing: aborts of old legs that it has not taken yet; no turn before that.
        backing_off_until: after a refusal or a loss, in seconds of the router's clock.
    """

    name: str
    kind: EngineKind
    version: WeightVersion | None
    gate_open: bool
    cap: int
    live: int = 0
    leaving: bool = False
    fencing: bool = False
    backing_off_until: float = 0.0
    speed: Speed = field(default_factory=Speed)
    hazard: Hazard = field(default_factory=Hazard)


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as placement sees it.

    Attributes:
        context: tokens the engine must have keys for: prompt and held output.
        expected: output tokens still to come.
        home: engine of the session's last turn, which has ``cached`` tokens of the context.
        avoid: engines that this turn has just lost or that did not answer it.
    """

    context: int
    expected: int
    pin: Pin = NO_PIN
    dedicated_only: bool = False
    home: str = ""
    cached: int = 0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Policy:
    """Knobs of placement.

    Attributes:
        max_staleness: publishes an engine may lag behind the newest version known.
        pause_seconds: what a reclaim costs a turn beside its re-prefill.
        crowding_seconds: added for an engine that is full, in proportion below.
        move_margin: a session leaves home when it gains this share of the re-prefill on top.
    """

    max_staleness: int = 1
    pause_seconds: float = 2.0
    crowding_seconds: float = 0.5
    move_margin: float = 0.5


@dataclass(frozen=True, slots=True)
class Placement:
    """Send the turn here; ``cost`` is the expected seconds."""

    engine: str
    cost: float


@dataclass(frozen=True, slots=True)
class Wait:
    """No engine can take the turn now; ``obstacle`` is the least one of any engine."""

    obstacle: Obstacle


def obstacle(
    turn: TurnView, engine: EngineView, head: WeightVersion | None, policy: Policy, now: float
) -> Obstacle | None:
    """Why this engine cannot take this turn now, ``None`` when it can."""
    version = engine.version
    checks = (
        (engine.leaving, Obstacle.LEAVING),
        (turn.dedicated_only and engine.kind is not EngineKind.DEDICATED, Obstacle.DEDICATED_ONLY),
        (engine.name in turn.avoid, Obstacle.LOST_IT),
        (version is None or head is None, Obstacle.UNATTESTED),
        (version is not None and not satisfies(version, turn.pin), Obstacle.PINNED),
        (_stale(version, head, turn.pin, policy), Obstacle.STALE),
        (not engine.gate_open, Obstacle.GATE_CLOSED),
        (engine.backing_off_until > now, Obstacle.BACKING_OFF),
        (engine.fencing, Obstacle.FENCING),
        (engine.live >= engine.cap, Obstacle.FULL),
    )
    return next((word for holds, word in checks if holds), None)


def _stale(
    version: WeightVersion | None, head: WeightVersion | None, pin: Pin, policy: Policy
) -> bool:
    if version is None or head is None or (pin.exact is not None and version == pin.exact):
        return False  # unattested is another word; who asks for an old version by name gets it
    return not fresh(version, head, policy.max_staleness)


def seconds(turn: TurnView, engine: EngineView) -> float:
    """Expected time of the turn on the engine: prefill of what is not cached, decode, pauses."""
    cached = min(turn.cached, turn.context) if engine.name == turn.home else 0
    prefill = (turn.context - cached) * engine.speed.prefill_seconds_per_token
    return (prefill + turn.expected * engine.speed.step_seconds) / engine.hazard.open_share


def cost(turn: TurnView, engine: EngineView, policy: Policy) -> float:
    """The score, in seconds; lower is better."""
    time = seconds(turn, engine)
    crowding = policy.crowding_seconds * engine.live / max(engine.cap, 1)
    if engine.kind is EngineKind.DEDICATED:
        return time + crowding
    again = (turn.context + turn.expected / 2) * engine.speed.prefill_seconds_per_token
    taken = 1.0 - math.exp(-engine.hazard.per_second * time)
    return time + crowding + taken * (again + policy.pause_seconds)


def place(
    turn: TurnView,
    engines: Iterable[EngineView],
    head: WeightVersion | None,
    policy: Policy,
    now: float,
) -> Placement | Wait:
    """Choose the engine.

    Args:
        turn: what is to be placed.
        engines: every engine attached.
        head: newest version known; ``None`` when nobody has named one.
        policy: knobs.
        now: seconds of the router's clock.
    """
    nearest = Obstacle.NO_ENGINE
    able: list[EngineView] = []
    for engine in engines:
        word = obstacle(turn, engine, head, policy, now)
        if word is None:
            able.append(engine)
        else:
            nearest = max(nearest, word)
    return _cheapest(turn, able, policy) if able else Wait(nearest)


def _cheapest(turn: TurnView, able: Sequence[EngineView], policy: Policy) -> Placement:
    costs = {engine.name: cost(turn, engine, policy) for engine in able}
    best = min(able, key=lambda engine: (costs[engine.name], engine.name))
    home = next((engine for engine in able if engine.name == turn.home), None)
    if home is not None and home is not best:
        reprefill = turn.cached * best.speed.prefill_seconds_per_token
        if costs[home.name] - costs[best.name] <= policy.move_margin * reprefill:
            best = home
    return Placement(best.name, costs[best.name])
