"""Who of the engines that can take a turn gets it, by name of the rule.

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
the sources.
``cache-aware`` has the thresholds of sglang-router's policy of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rose_core.rollouts.placement.guards import PlacementCase, borrowed, dedicated, narrowed
from rose_core.rollouts.placement.scoring import cost
from rose_core.rollouts.placement.views import EngineView, Policy, PolicyName, TurnView

# As sglang-router's policy has them by default, so that it can be compared with.
_CACHE_THRESHOLD = 0.3
_BALANCE_TURNS = 64
_BALANCE_RATIO = 1.5

Rule = Callable[[PlacementCase], EngineView | None]


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
