"""Whether an engine can take a turn at all; the same for every policy. Next: ``policies``."""

from __future__ import annotations

from rose_core.identity import WeightVersion
from rose_core.rollouts.versions import Pin, fresh, satisfies
from rose_core.rollouts.views import EngineView, Obstacle, Policy, TurnView
from rose_core.wire.routing import EngineKind


def obstacle(
    turn: TurnView, engine: EngineView, head: WeightVersion | None, policy: Policy, now: float
) -> Obstacle | None:
    """Why this engine cannot take this turn now, ``None`` when it can; what lasts longest first."""
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
    return Obstacle.LOST_IT if engine.name in turn.avoid else None


def _with_these_weights(
    turn: TurnView, engine: EngineView, head: WeightVersion | None, policy: Policy
) -> Obstacle | None:
    version = engine.version
    if version is None or head is None:
        return Obstacle.UNATTESTED
    if not satisfies(version, turn.pin):
        return Obstacle.PINNED
    return Obstacle.STALE if _stale(version, head, turn.pin, policy) else None


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
    return (turn.dedicated_only, turn.pin, turn.avoid, turn.alone)
