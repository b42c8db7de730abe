"""Which waiting turn is placed next: a home that is full or shut for a moment is waited for.

The keys of a session lie on its home. If the turn that waits longest takes whatever engine has
room, it makes that engine prefill its whole context, and the next one whose home *that* was does
the same elsewhere: a queue that never empties makes a fleet prefill instead of decode. Waiting for
home costs time, moving costs a prefill during which every turn on the target stands still. A turn
waits at most as long as its move would cost: ski rental (Karlin et al., "Competitive snoopy
caching", 1988), so it never loses more than twice the better of the two; turns behind it that leave
no keys go first meanwhile.

| the waiting turn's home | then |
|---|---|
| none, gone, leaving, of an unusable version, or without its keys | placed anywhere |
| has room | placed; ``placement`` may still find a move worth it |
| full, gate closed, backing off or fencing, waited less than the move costs | passed over |
| the same, waited longer | placed anywhere |

*Anywhere* leaves out engines whose KV pool it would overflow (``residency``). A turn of a
trajectory that has begun leaves them out for ``ROOM_SECONDS`` only: shorter ones could pass a long
context for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement.guards import NOTHING_KNOWN, only_choice
from rose_core.rollouts.placement.residency import IDLE_SECONDS, Residents
from rose_core.rollouts.placement.selection import (
    EngineView,
    Obstacle,
    Placement,
    Policy,
    RolloutOutlook,
    SortedEngines,
    TurnView,
    Wait,
    among,
    filter_key,
    obstacle,
    sort_out,
)

_PASSING = frozenset({Obstacle.FULL, Obstacle.GATE_CLOSED, Obstacle.BACKING_OFF, Obstacle.FENCING})
"""What keeps a home from taking the turn for a moment only."""

ROOM_SECONDS = IDLE_SECONDS
"""Keys of sessions that do not come back are out of the count by then; what still fills a pool are
those that do, and pushing out the oldest of them costs one prefill."""


class WaitingTurn(Protocol):
    """A turn that waits: how placement sees it, and since when (seconds of the caller's clock)."""

    @property
    def view(self) -> TurnView:
        """The turn."""
        ...

    @property
    def since(self) -> float:
        """When it began to wait."""
        ...


Chosen = tuple[int, Placement]


class DispatchState(msgspec.Struct, frozen=True, gc=False):
    """What the choice is made from.

    Attributes:
        engines: every engine attached.
        head: newest version known.
        policy: knobs of placement.
        now: seconds of the caller's clock.
        outlook: what is known of all trajectories together.
        residents: which keys lie where; None = nothing is known of KV pools.
    """

    engines: Sequence[EngineView]
    head: WeightVersion | None
    policy: Policy
    now: float
    outlook: RolloutOutlook = NOTHING_KNOWN
    residents: Residents | None = None


def _sooner(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def _place(
    turn: TurnView, since: float, found: SortedEngines, scene: DispatchState
) -> tuple[Placement | Wait, float | None]:
    """Where a turn goes now; and until when one that has begun waits for room at its best place."""
    answer = anywhere(turn, found, scene)
    if not isinstance(answer, Wait) or not found.able or turn.begins:
        return answer, None
    until = since + ROOM_SECONDS
    if scene.now >= until:
        return among(turn, found, scene.policy, scene.outlook), None
    return answer, until


def next_turn(
    waiting: Sequence[WaitingTurn], scene: DispatchState
) -> tuple[Chosen | None, float | None]:
    """The next turn to place, of those that wait in the order of ``admission.rank``.

    Returns:
        The turn's index with its placement, None when no turn can go now; and the time at which
        the first of those passed over stops waiting for its home, None when none was.
    """
    able = [engine for engine in scene.engines if _has_room(engine, scene.now)]
    again: float | None = None
    if not able:
        return None, None
    hopeless: set[tuple[object, ...]] = set()  # alike in what they can run on, and nothing can
    passing: dict[tuple[object, ...], SortedEngines] = {}
    for index, one in enumerate(waiting):
        turn = one.view
        sort = filter_key(turn)
        if (sort, turn.begins) in hopeless:
            continue
        until = _patience(turn, one.since, able, scene) if turn.cached else None
        if until is not None:
            again = _sooner(again, until)
            continue
        if sort not in passing:
            passing[sort] = sort_out(turn, scene.engines, scene.head, scene.policy, scene.now)
        answer, until = _place(turn, one.since, passing[sort], scene)
        if until is not None:
            again = _sooner(again, until)
        if isinstance(answer, Placement):
            return (index, answer), again
        if answer.obstacle is not Obstacle.FULL or turn.begins:
            hopeless.add((sort, turn.begins))
    return None, again


def at_once(
    turn: TurnView, scene: DispatchState, outlook: Callable[[], RolloutOutlook]
) -> Placement | None:
    """The placement of a turn that comes while none waits; ``next_turn`` would say the same.

    Args:
        turn: what is to be placed, by the joint rule.
        scene: what the choice is made from.
        outlook: instead of the scene's; not asked where there is no choice.

    Returns:
        ``None`` where it must wait, for its home or for any engine.
    """
    if turn.cached:
        able = [engine for engine in scene.engines if _has_room(engine, scene.now)]
        if not able or _patience(turn, scene.now, able, scene) is not None:
            return None
    found = sort_out(turn, scene.engines, scene.head, scene.policy, scene.now)
    found = _uncrowded(turn, found, scene)
    if not found.able:
        return None
    alone = only_choice(turn, found.able, found.full)
    if alone is not None:
        return Placement(alone.name)
    answer = among(turn, found, scene.policy, outlook())
    return answer if isinstance(answer, Placement) else None


def _patience(
    turn: TurnView, since: float, able: Sequence[EngineView], scene: DispatchState
) -> float | None:
    """Until when the turn, which has keys at its home, waits for it; None when it need not."""
    home = next((engine for engine in scene.engines if engine.name == turn.home), None)
    if home is None or _has_room(home, scene.now):
        return None
    price = min(engine.speed.prefill_seconds_per_token * (1 + engine.live) for engine in able)
    until = since + min(turn.cached, turn.context) * price
    passing = obstacle(turn, home, scene.head, scene.policy, scene.now) in _PASSING
    return until if passing and scene.now < until else None


def anywhere(turn: TurnView, found: SortedEngines, scene: DispatchState) -> Placement | Wait:
    """The turn's placement; ``Wait(FULL)`` also where its context would push out others."""
    if not found.able:
        return Wait(found.nearest)
    answer = among(turn, _uncrowded(turn, found, scene), scene.policy, scene.outlook)
    return answer if isinstance(answer, Placement) else Wait(Obstacle.FULL)


def _uncrowded(turn: TurnView, found: SortedEngines, scene: DispatchState) -> SortedEngines:
    """Without engines where the turn's context would push out others."""
    if scene.residents is not None:
        crowded = scene.residents.without_room(turn, found.able, scene.now)
        if crowded:
            room = [engine for engine in found.able if engine.name not in crowded]
            return SortedEngines(room, found.full, found.nearest)
    return found


def _has_room(engine: EngineView, now: float) -> bool:
    """Whether the engine could take some turn now."""
    return (
        engine.gate_open
        and engine.live < engine.cap
        and (not engine.kept or not engine.live)
        and not engine.leaving
        and not engine.fencing
        and engine.backing_off_until <= now
    )
