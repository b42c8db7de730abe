"""Trajectories that move while their tools run: the next home is warmed with their prefix.

Between two turns the environment answers, for seconds. If the keys of a trajectory are lost
meanwhile, its next turn would prefill the whole context, with somebody waiting for it. Nobody waits
now: the engine that placement would choose is asked to prefill it at once, and becomes the home.

| the resting trajectory | then |
|---|---|
| has a short context | left alone: not worth a request |
| of those that rested as long, fewer than half came back (``ReturnRates``) | left alone |
| its home has its keys and is open, or shut for a moment only | left alone |
| its home is gone, leaves, was given other weights, or is shut for long | warmed there |

| bound | because |
|---|---|
| nothing while a turn waits for an engine | engines have better to do |
| no borrowed engine whose gate is often closed | serving is busy there |
| one at a time on an engine | turns that decode there stand still for a prefill |
| none on an engine whose KV pool it would overflow | others come back to their keys |
| so often in one gap | weights may change faster than tools answer |

Nobody says that a trajectory is over, so each is judged by how others came back. The newest go
first: a gap that has lasted long is likely to last longer. Shells send the prefill,
end it when the gate closes or the turn comes, and count what came of it (``WarmOutcome``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from rose_core.rollouts.placement.dispatch import DispatchState, anywhere
from rose_core.rollouts.placement.selection import EngineView, Placement, TurnView, sort_out
from rose_core.wire.routing import EngineKind

LOOK_SECONDS = 0.5
"""Shells look again so often."""

_GAPS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_KEEP = 1.0 - 1.0 / 512


class ReturnRates:
    """How many of those that rested for so long came back; the last few hundred count."""

    def __init__(self) -> None:
        self._came = [0.0] * (len(_GAPS) + 1)
        self._never = 1.0  # before anything was seen, nobody is expected

    def record_return(self, rested: float) -> None:
        """Count a trajectory that came back after so many seconds of rest."""
        self._fade()
        self._came[bisect_right(_GAPS, rested)] += 1.0

    def record_absence(self) -> None:
        """Count a trajectory that did not come back for as long as one is waited for."""
        self._fade()
        self._never += 1.0

    def share(self, rested: float) -> float:
        """The share that comes back of those that have rested for so long."""
        later = sum(self._came[bisect_right(_GAPS, rested) :])
        return later / (later + self._never)

    def _fade(self) -> None:
        self._came = [count * _KEEP for count in self._came]
        self._never *= _KEEP


class WarmOutcome(StrEnum):
    """What came of a prefix that was warmed; also the metric's label."""

    USED = "Used"
    ELSEWHERE = "Elsewhere"
    LATE = "Late"
    STOPPED = "Stopped"
    UNUSED = "Unused"


@dataclass(frozen=True, slots=True)
class WarmBound:
    """How much is warmed.

    Attributes:
        seconds: a trajectory that has rested for longer is left alone.
        least_tokens: shorter contexts are not worth a request.
        times: in one gap.
        shut_seconds: a home shut for less is waited for.
        return_share: of those that have rested as long, this share must have come back.
        open_share: of the time a borrowed engine's gate must have been open lately.
    """

    seconds: float = 60.0
    least_tokens: int = 512
    times: int = 2
    shut_seconds: float = 5.0
    return_share: float = 0.5
    open_share: float = 0.5


@dataclass(frozen=True, slots=True)
class Resting:
    """A trajectory between two turns.

    Attributes:
        since: when its last turn ended, in seconds of the caller's clock.
        times: it was warmed in this gap.
        home: engine of its last turn, or where it was warmed since.
        keys: that engine still has them, under the weights it has now.
        shut_since: when the home's gate closed; None = it is open.
        view: its next turn, were it to come now; made only when it is needed.
    """

    name: str
    context: int
    since: float
    times: int
    home: str
    keys: bool
    shut_since: float | None
    view: Callable[[], TurnView]


@dataclass(frozen=True, slots=True)
class Warm:
    """Prefill the trajectory's context there."""

    name: str
    engine: str


def to_warm(
    resting: Sequence[Resting],
    scene: DispatchState,
    returns: ReturnRates,
    *,
    waiting: int,
    warming: Set[str],
    bound: WarmBound = WarmBound(),
) -> tuple[Warm, ...]:
    """What to warm now.

    Args:
        resting: trajectories between two turns that are not being warmed.
        scene: engines, and what else placement asks.
        returns: how others came back.
        waiting: turns that wait for an engine.
        warming: engines that warm a prefix already.
        bound: how much.
    """
    if waiting:
        return ()
    known = {engine.name: engine for engine in scene.engines}
    calm = [engine for engine in scene.engines if _calm(engine, bound)]
    taken = set(warming)
    found: list[Warm] = []
    for one in sorted(resting, key=lambda one: -one.since):
        if len(taken) >= len(calm):
            break
        if not _homeless(one, known.get(one.home), scene.now, bound):
            continue
        if returns.share(scene.now - one.since) < bound.return_share:
            break  # those that have rested for longer come back less often
        engine = _next_home(one.view(), calm, scene)
        if engine and engine not in taken:
            taken.add(engine)
            found.append(Warm(one.name, engine))
    return tuple(found)


def _calm(engine: EngineView, bound: WarmBound) -> bool:
    """Whether an engine may be asked for what nobody waits for."""
    if engine.kind is EngineKind.DEDICATED:
        return engine.gate_open
    return engine.gate_open and engine.hazard.open_share >= bound.open_share


def _homeless(one: Resting, home: EngineView | None, now: float, bound: WarmBound) -> bool:
    """Whether its next turn would find no keys, and that is worth something."""
    if one.times >= bound.times or one.context < bound.least_tokens:
        return False
    if home is None or home.leaving or not one.keys:
        return True
    return one.shut_since is not None and now - one.shut_since >= bound.shut_seconds


def _next_home(turn: TurnView, calm: Sequence[EngineView], scene: DispatchState) -> str:
    """Where placement would send it now; empty when nowhere."""
    found = sort_out(turn, calm, scene.head, scene.policy, scene.now)
    answer = anywhere(turn, found, scene)
    return answer.engine if isinstance(answer, Placement) else ""
