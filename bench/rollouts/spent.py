"""Where the time of a step went: the life of its last trajectory, part by part, and a bound.

A step ends with its last trajectory, so the parts of that one's life add up to the makespan:

| part | while |
|---|---|
| tools | its environment answers |
| alone | its turns would run on an engine of their own: prefill of what is new, decode |
| queue | it waits for an engine |
| shut | the gate of its engine is closed |
| again | prompts are prefilled and tokens sampled that had been before |
| neighbours | the rest: others share its engine |

No placement makes a trajectory shorter than tools and alone, whatever it knows. The longest of a
step is the clairvoyant bound: what the step takes if nobody ever shares the engine of that one.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from rose_core.rollouts.terms import Policies
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.routing.router import Router, RouterOptions
from rose_simulate.model.routing.turns import AttachedEngine, RoutedLeg, RoutedTurn
from rose_simulate.model.scenarios.costs import ModelCosts, pairs, time_of


@dataclass(slots=True)
class Life:
    """One trajectory so far, seconds.

    Attributes:
        seen: when it asked for its first turn; what came before was its environment.
        ended: when its last turn ended.
        worked: what all its legs would have taken alone.
        keys: tokens of its context after the last turn.
    """

    seen: float
    ended: float
    tools: float = 0.0
    alone: float = 0.0
    worked: float = 0.0
    queue: float = 0.0
    shut: float = 0.0
    keys: int = 0


@dataclass(frozen=True)
class Parts:
    """The parts of one life, seconds; they add up to all of it."""

    tools: float
    alone: float
    queue: float
    shut: float
    again: float
    neighbours: float


PARTS = tuple(part.name for part in fields(Parts))


@dataclass(frozen=True)
class Step:
    """One synchronous step, seconds.

    Attributes:
        last: the trajectory that ended it.
        bound: no placement makes it shorter.
    """

    makespan: float
    last: Parts
    bound: float


class Observed(Router):
    """The same router, with a record of every trajectory's time.

    Args:
        costs: of its engines, which have to be alike.
        lives: the record, by trajectory; filled here.
    """

    def __init__(
        self,
        clock: VirtualClock,
        run: str,
        policies: Policies,
        manners: RouterOptions,
        draw: random.Random,
        *,
        costs: ModelCosts,
        lives: dict[str, Life],
    ) -> None:
        super().__init__(clock, run, policies, manners, draw)
        self._costs, self._lives = costs, lives
        self._shut_s: dict[str, float] = {}  # of each engine, until its gate moved last
        self._shut_before: dict[RoutedLeg, float] = {}

    def on_gate(self, name: str, is_open: bool) -> None:
        """An engine's gate has moved."""
        engine = self.engines.get(name)
        if engine is not None and engine.gate_open != is_open:
            self._shut_s[name] = self._shut(engine)
        super().on_gate(name, is_open)

    def submit(self, turn: RoutedTurn) -> None:
        """A turn has come."""
        now = self._clock.now_s
        life = self._lives.setdefault(turn.session, Life(now, now))
        life.tools += now - life.ended
        life.alone += self._alone(turn.context - life.keys, turn.context, turn.output)
        life.keys = turn.context + turn.output
        super().submit(turn)

    def _begin(self, turn: RoutedTurn, engine: AttachedEngine) -> None:
        self._lives[turn.session].queue += self._clock.now_s - turn.since
        super()._begin(turn, engine)
        self._shut_before[engine.legs[-1]] = self._shut(engine)

    def _end(self, leg: RoutedLeg, *, kept: bool, inside: bool) -> None:
        super()._end(leg, kept=kept, inside=inside)
        life, work = self._lives[leg.turn.session], leg.sequence
        life.shut += self._shut(leg.engine) - self._shut_before.pop(leg)
        life.worked += self._alone(work.uncached, work.context, work.produced)
        life.ended = self._clock.now_s

    def _shut(self, engine: AttachedEngine) -> float:
        """For how long the engine's gate has been closed, in all."""
        before = self._shut_s.get(engine.name, 0.0)
        return before + (0 if engine.gate_open else self._clock.now_ns - engine.gate_ns) / SECOND

    def _alone(self, new: int, context: int, output: int) -> float:
        if not output:
            return 0.0  # it left before its first token
        prefill = self._costs.prefill(new, pairs(new, context - new))
        return prefill + time_of(*self._costs.step(1, context + 1), output - 1)


def steps(lives: Mapping[str, Life], makespans: Sequence[float], train_s: float) -> list[Step]:
    """The synchronous steps, one after the other; each begins when the one before is trained on.

    Args:
        lives: by trajectory.
        makespans: of the steps that ended, seconds, training taken off.
        train_s: between the end of a step and the beginning of the next.
    """
    ends = [end - train_s for end in accumulate(one + train_s for one in makespans)]
    members: list[list[Life]] = [[] for _ in ends]
    for life in lives.values():
        # A clock of nanoseconds and sums of seconds differ in the last digits.
        number = bisect_left(ends, life.ended - train_s / 2)
        if number < len(ends):
            members[number].append(life)
    found: list[Step] = []
    for makespan, end, mine in zip(makespans, ends, members, strict=True):
        begun = end - makespan
        bound = max(life.seen - begun + life.tools + life.alone for life in mine)
        last = max(mine, key=lambda life: life.ended)
        found.append(Step(makespan, parts(last, begun), bound))
    return found


def parts(life: Life, begun: float) -> Parts:
    """What a life that began then was made of."""
    tools = life.seen - begun + life.tools
    again = life.worked - life.alone
    known = tools + life.alone + life.queue + life.shut + again
    return Parts(tools, life.alone, life.queue, life.shut, again, life.ended - begun - known)
