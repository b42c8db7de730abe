"""One engine for one turn: hard filters, then the policy's choice among those that pass.

``policies`` says who of them gets it, ``scoring`` what it costs.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement.guards import NOTHING_KNOWN, PlacementCase, RolloutOutlook
from rose_core.rollouts.placement.policies import choose
from rose_core.rollouts.placement.scoring import cost, seconds, stall
from rose_core.rollouts.placement.views import (
    EngineView,
    Obstacle,
    Placement,
    Policy,
    PolicyName,
    TurnView,
    Wait,
)
from rose_core.rollouts.versions import NO_PIN, Pin, fresh, satisfies
from rose_core.wire.routing import EngineKind

__all__ = [
    "EngineView",
    "Obstacle",
    "Placement",
    "Policy",
    "PolicyName",
    "RolloutOutlook",
    "SortedEngines",
    "TurnView",
    "Wait",
    "among",
    "cost",
    "filter_key",
    "obstacle",
    "place",
    "seconds",
    "sort_out",
    "stall",
]

# Named once: an enum's member is slow to find.
_NO_ENGINE, _FULL = Obstacle.NO_ENGINE, Obstacle.FULL


def obstacle(
    turn: TurnView, engine: EngineView, head: WeightVersion | None, policy: Policy, now: float
) -> Obstacle | None:
    """Why this engine cannot take this turn now, ``None`` when it can; what lasts longest first.

    The same for every policy. Next step: ``policies`` chooses among those that can.
    """
    return (
        _never(turn, engine)
        or _with_these_weights(turn, engine, head, policy)
        or _now(turn, engine, now)
    )


def _never(turn: TurnView, engine: EngineView) -> Obstacle | None:
    if engine.leaving:
        return Obstacle.LEAVING
    if turn.dedicated_only and engine.kind is not EngineKind.DEDICATED:
        return Obstacle.DEDICATED_ONLY
    if turn.asked and not turn.asked.isdisjoint(engine.refuses):
        return Obstacle.NOT_TAKEN
    return Obstacle.LOST_IT if engine.name in turn.avoid else None


def _with_these_weights(
    turn: TurnView, engine: EngineView, head: WeightVersion | None, policy: Policy
) -> Obstacle | None:
    version, head = engine.version, engine.head or head
    if version is None or head is None:
        return Obstacle.UNATTESTED
    pin = turn.pin
    if (pin is not NO_PIN and not satisfies(version, pin)) or (engine.named and not pin.run):
        return Obstacle.PINNED
    if version is head:
        return None  # the usual case
    return Obstacle.STALE if _stale(version, head, pin, policy) else None


def _now(turn: TurnView, engine: EngineView, now: float) -> Obstacle | None:
    if not engine.gate_open:
        return Obstacle.GATE_CLOSED
    if engine.backing_off_until > now:
        return Obstacle.BACKING_OFF
    if engine.fencing:
        return Obstacle.FENCING
    full = engine.live >= engine.cap
    crowded = engine.live > 0 if turn.alone else engine.kept
    return Obstacle.FULL if full or crowded else None


def _stale(version: WeightVersion, head: WeightVersion, pin: Pin, policy: Policy) -> bool:
    if pin.exact is not None and version == pin.exact:
        return False  # who asks for an old version by name gets it
    return not fresh(version, head, policy.max_staleness)


def filter_key(turn: TurnView) -> tuple[object, ...]:
    """What the filters ask of a turn: with equal answers, the same engines can take it."""
    return (turn.dedicated_only, turn.pin, turn.avoid, turn.alone, turn.asked)


def place(
    turn: TurnView,
    engines: Iterable[EngineView],
    head: WeightVersion | None,
    policy: Policy,
    now: float,
    *,
    outlook: RolloutOutlook = NOTHING_KNOWN,
) -> Placement | Wait:
    """Choose the engine.

    Args:
        turn: what is to be placed.
        engines: every engine attached.
        head: newest version known; ``None`` when nobody has named one.
        policy: the rule and its knobs.
        now: seconds of the router's clock.
        outlook: what is known of all trajectories together.
    """
    return among(turn, sort_out(turn, engines, head, policy, now), policy, outlook)


class SortedEngines(msgspec.Struct, frozen=True, gc=False):
    """Engines by whether they can take a turn.

    Attributes:
        able: pass every filter.
        full: would pass if they had room.
        nearest: the least obstacle of those that do not pass.
    """

    able: list[EngineView]
    full: list[EngineView]
    nearest: Obstacle


def sort_out(
    turn: TurnView,
    engines: Iterable[EngineView],
    head: WeightVersion | None,
    policy: Policy,
    now: float,
) -> SortedEngines:
    """Apply the filters; the answer is the same for turns of one ``filters.filter_key``."""
    nearest = _NO_ENGINE
    able: list[EngineView] = []
    full: list[EngineView] = []
    for engine in engines:
        reason = obstacle(turn, engine, head, policy, now)
        if reason is None:
            able.append(engine)
        else:
            nearest = max(nearest, reason)
            if reason is _FULL:
                full.append(engine)
    return SortedEngines(able, full, nearest)


def among(
    turn: TurnView, found: SortedEngines, policy: Policy, outlook: RolloutOutlook
) -> Placement | Wait:
    """The policy's choice among those that pass."""
    able = found.able
    chosen = choose(PlacementCase(turn, able, found.full, policy, outlook)) if able else None
    return Wait(found.nearest) if chosen is None else Placement(chosen.name)
