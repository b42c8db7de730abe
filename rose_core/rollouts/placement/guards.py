"""What keeps the joint rule from putting one sort of trajectory onto borrowed engines only.

A score alone sends the longest turns, or those about to be too old, to whatever engine is free, and
free is what is borrowed. Then a reclaim hits one sort of work more than another, and the batch is
biased. The guards narrow the choice; they never leave a turn without an engine that it could have,
with one exception: a turn that must not be risked, or is of the control arm, waits for a dedicated
engine that is merely full.

| guard | narrows to | unless |
|---|---|---|
| its group is of the control arm (``inclusion``) | dedicated | none is attached |
| too many losses | dedicated | none has room |
| trajectory begins while a loss of all borrowed engines could not be made good | dedicated | |
| last chance: the time left is shorter than one turn on a borrowed engine | dedicated | |
| moved a few turns ago | home | home cannot |
| its stratum met borrowed engines too often (too seldom) | dedicated (borrowed) | it is at home |
| no tail, and few dedicated places left | borrowed | it is at home |

Next: ``selection``. ``shares`` and ``prospects`` make the ``RolloutOutlook``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from rose_core.rollouts.placement.scoring import seconds
from rose_core.rollouts.placement.views import EngineView, Policy, TurnView
from rose_core.rollouts.versions import older
from rose_core.wire.routing import EngineKind

_AT_HOME = 0.5  # share of the context that must be cached at home for home to count


class RolloutOutlook(msgspec.Struct, frozen=True, gc=False):
    """What is known of all trajectories together.

    Attributes:
        borrowed_share: of all turns placed lately, how many met a borrowed engine.
        stratum_share: the same of one stratum, where enough of it was seen.
        safe: the dedicated engines could finish everything in time if every borrowed one vanished.
        dice: a random number from 0 to 1; below ``Policy.explore`` a beginning trajectory is placed
            at random, and 1 never is.
        swapping: runs of which a version was published just now; engines are about to have it.
    """

    borrowed_share: float = 0.0
    stratum_share: Mapping[str, float] = msgspec.field(default_factory=dict)
    safe: bool = True
    dice: float = 1.0
    swapping: frozenset[str] = frozenset()


NOTHING_KNOWN = RolloutOutlook()


class PlacementCase(msgspec.Struct, frozen=True, gc=False):
    """One decision.

    Attributes:
        turn: what is to be placed.
        able: engines that pass every filter; at least one.
        full: engines that would pass if they had room.
        outlook: of all trajectories together.
    """

    turn: TurnView
    able: Sequence[EngineView]
    full: Sequence[EngineView]
    policy: Policy
    outlook: RolloutOutlook = NOTHING_KNOWN


def dedicated(engines: Sequence[EngineView]) -> list[EngineView]:
    """Those that nobody takes back."""
    return [engine for engine in engines if engine.kind is EngineKind.DEDICATED]


def borrowed(engines: Sequence[EngineView]) -> list[EngineView]:
    """Those that may be taken back at any moment."""
    return [engine for engine in engines if engine.kind is EngineKind.BORROWED]


def narrowed(case: PlacementCase) -> Sequence[EngineView]:
    """The engines among which the score may choose.

    Returns:
        Some of ``able``; empty when the turn must wait for a dedicated engine.
    """
    turn, able, policy = case.turn, _young(case), case.policy
    if len(able) < 2 and not case.full:
        return able  # no guard leaves a turn without the only engine that could take it
    if turn.control or _must_be_safe(case):
        safe = dedicated(able)
        return safe if safe or dedicated(case.full) else able
    if turn.losses >= policy.losses:
        able = dedicated(able) or able
    home = [engine for engine in able if engine.name == turn.home]
    if home and turn.since_move < policy.move_every:
        return home
    if home and turn.cached >= _AT_HOME * turn.context:
        return able
    able = _quota(case, able) or able
    return _reserve(case, able) or able


def only_choice(
    turn: TurnView, able: Sequence[EngineView], full: Sequence[EngineView]
) -> EngineView | None:
    """The engine of a turn that guards and score have no choice about, whatever else is known.

    ``None`` where they have one, or might have the turn wait for younger weights.
    """
    if len(able) != 1 or full:
        return None
    alone = able[0]
    return alone if turn.from_version is None or turn.from_version is alone.version else None


def _young(case: PlacementCase) -> Sequence[EngineView]:
    """Engines whose weights do not age the trajectory."""
    least = case.turn.from_version
    if least is None:
        return case.able
    young = [one for one in case.able if one.version is not None and not older(one.version, least)]
    return young if young or least.run in case.outlook.swapping else case.able


def _must_be_safe(case: PlacementCase) -> bool:
    turn = case.turn
    if turn.begins and not case.outlook.safe:
        return True
    if turn.budget_seconds == math.inf:
        return False
    risky = borrowed(case.able)
    shortest = min((seconds(turn, engine) for engine in risky), default=0.0)
    # Already too late is no last chance: such a trajectory is not worth a reserved place.
    return 0.0 < turn.budget_seconds < shortest


def _quota(case: PlacementCase, able: Sequence[EngineView]) -> Sequence[EngineView]:
    outlook, quota = case.outlook, case.policy.quota
    share = outlook.stratum_share.get(case.turn.stratum)
    if share is None:
        return able
    if share > outlook.borrowed_share + quota:
        return dedicated(able)
    if share >= outlook.borrowed_share - quota:
        return able
    idle = any(not engine.live for engine in dedicated(able))
    return able if idle else borrowed(able)


def _reserve(case: PlacementCase, able: Sequence[EngineView]) -> Sequence[EngineView]:
    if case.turn.tail:
        return able
    ours = dedicated([*case.able, *case.full])
    free = sum(max(0, engine.cap - engine.live) for engine in ours)
    places = sum(engine.cap for engine in ours)
    return borrowed(able) if free <= case.policy.reserve * places else able
