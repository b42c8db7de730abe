"""One engine for one turn: hard filters, then the policy's choice among those that pass.

``filters`` says who can take the turn, ``policies`` who of them gets it, ``scoring`` what it costs.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rose_core.identity import WeightVersion
from rose_core.rollouts.filters import filter_key, obstacle
from rose_core.rollouts.guards import NOTHING_KNOWN, PlacementCase, RolloutOutlook
from rose_core.rollouts.policies import choose
from rose_core.rollouts.scoring import cost, seconds, stall
from rose_core.rollouts.views import (
    EngineView,
    Obstacle,
    Placement,
    Policy,
    PolicyName,
    TurnView,
    Wait,
)

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
    nearest = Obstacle.NO_ENGINE
    able: list[EngineView] = []
    full: list[EngineView] = []
    for engine in engines:
        word = obstacle(turn, engine, head, policy, now)
        if word is None:
            able.append(engine)
        else:
            nearest = max(nearest, word)
            if word is Obstacle.FULL:
                full.append(engine)
    return SortedEngines(able, full, nearest)


def among(
    turn: TurnView, found: SortedEngines, policy: Policy, outlook: RolloutOutlook
) -> Placement | Wait:
    """The policy's choice among those that pass."""
    able = found.able
    chosen = choose(PlacementCase(turn, able, found.full, policy, outlook)) if able else None
    if chosen is None:
        return Wait(found.nearest)
    return Placement(chosen.name, cost(turn, chosen, policy))
