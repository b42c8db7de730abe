"""One engine for one turn: hard filters, then the policy's choice among those that pass.

``scoring`` says what a turn costs on each. Who of the engines that can take it gets it, by rule:

| name | rule |
|---|---|
| ``joint`` | guards narrow the choice, then the least cost; home unless leaving it gains a margin |
| ``rose-paper`` | the last engine, else the least loaded borrowed one, else the least loaded |
| ``rose-paper-dedicated`` | the last engine, else the least loaded of ours, else of all |
| ``cache-aware`` | home while enough is cached there and loads are even, else the fewest turns |
| ``least-loaded`` | the smallest share of its places taken |
| ``fixed`` | dedicated engines only, least cost: what a job has without borrowing |
| ``long-to-borrowed`` | degenerate, for comparison: the tail goes to borrowed engines |
| ``late-to-borrowed`` | degenerate, for comparison: what is about to be too old goes there |

The ROSE paper's order is known from secondary notes only, and they disagree: one has borrowed
engines first, two have dedicated ones first. Both readings stand here; ``simulate.paper`` has
the sources. ``cache-aware`` has the thresholds of sglang-router's policy of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement.guards import (
    NOTHING_KNOWN,
    PlacementCase,
    RolloutOutlook,
    borrowed,
    dedicated,
    narrowed,
)
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


# As sglang-router's policy has them by default, so that it can be compared with.
_CACHE_THRESHOLD = 0.3
_BALANCE_TURNS = 64
_BALANCE_RATIO = 1.5
Rule = Callable[[PlacementCase], EngineView | None]


def obstacle(
    turn: TurnView, engine: EngineView, head: WeightVersion | None, policy: Policy, now: float
) -> Obstacle | None:
    """Why this engine cannot take this turn now, ``None`` when it can; what lasts longest first.

    The same for every policy.
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


def choose(case: PlacementCase) -> EngineView | None:
    """The engine by the policy's rule: one of ``able``; ``None`` when the turn had better wait."""
    return RULES[case.policy.name](case)


def _joint(case: PlacementCase) -> EngineView | None:
    left = narrowed(case)
    if not left:
        return None
    dice, explore = case.outlook.dice, case.policy.explore
    if case.turn.begins and dice < explore:
        by_name = sorted(left, key=lambda engine: engine.name)
        return by_name[int(dice / explore * len(by_name))]
    return cheapest(case.turn, left, case.policy)


def cheapest(turn: TurnView, able: Sequence[EngineView], policy: Policy) -> EngineView:
    """The least cost; home unless leaving it gains ``move_margin`` of the re-prefill on top."""
    if len(able) == 1:
        return able[0]
    costs = {engine.name: cost(turn, engine, policy) for engine in able}
    best = min(able, key=lambda engine: (costs[engine.name], engine.name))
    home = _home(turn, able)
    if home is not None and home is not best:
        reprefill = turn.cached * best.speed.prefill_seconds_per_token
        if costs[home.name] - costs[best.name] <= policy.move_margin * reprefill:
            return home
    return best


def _rose_paper(case: PlacementCase) -> EngineView | None:
    return _home(case.turn, case.able) or _least_of(borrowed(case.able) or case.able)


def _rose_paper_dedicated(case: PlacementCase) -> EngineView | None:
    return _home(case.turn, case.able) or _least_of(dedicated(case.able) or case.able)


def _cache_aware(case: PlacementCase) -> EngineView | None:
    turn, able = case.turn, case.able
    loads = [engine.live for engine in (*able, *case.full)]
    uneven = max(loads) - min(loads) > _BALANCE_TURNS and max(loads) > _BALANCE_RATIO * min(loads)
    home = _home(turn, able)
    if home is not None and not uneven and turn.cached > _CACHE_THRESHOLD * turn.context:
        return home
    return min(able, key=lambda engine: (engine.live, engine.name))


def _least_loaded(case: PlacementCase) -> EngineView | None:
    return _least_of(case.able)


def _fixed(case: PlacementCase) -> EngineView | None:
    ours = dedicated(case.able)
    return cheapest(case.turn, ours, case.policy) if ours else None


def _long_to_borrowed(case: PlacementCase) -> EngineView | None:
    return _split(case, to_borrowed=case.turn.tail)


def _late_to_borrowed(case: PlacementCase) -> EngineView | None:
    step = min(engine.speed.step_seconds for engine in case.able)
    late = case.turn.budget_seconds < 2 * case.turn.rest_tokens * step
    return _split(case, to_borrowed=late)


def _split(case: PlacementCase, *, to_borrowed: bool) -> EngineView:
    wanted = borrowed(case.able) if to_borrowed else dedicated(case.able)
    return cheapest(case.turn, wanted or case.able, case.policy)


def _home(turn: TurnView, able: Sequence[EngineView]) -> EngineView | None:
    return next((engine for engine in able if engine.name == turn.home), None)


def _least_of(able: Sequence[EngineView]) -> EngineView:
    return min(able, key=lambda engine: (engine.live / max(engine.cap, 1), engine.name))


RULES: Mapping[PolicyName, Rule] = {
    PolicyName.JOINT: _joint,
    PolicyName.ROSE_PAPER: _rose_paper,
    PolicyName.ROSE_PAPER_DEDICATED: _rose_paper_dedicated,
    PolicyName.CACHE_AWARE: _cache_aware,
    PolicyName.LEAST_LOADED: _least_loaded,
    PolicyName.FIXED: _fixed,
    PolicyName.LONG_TO_BORROWED: _long_to_borrowed,
    PolicyName.LATE_TO_BORROWED: _late_to_borrowed,
}
