"""Which reward is computed next (pure): the one that completes a group.

A trainer waits for whole groups. The members of one that lacks few are worth more than those of
one that has just begun; among equals the earlier deadline goes first, then the earlier arrival.
Last go those whose group is decided without them (``groups``).

Those of one function and group differ by deadline and arrival alone, so each such lane has a heap
of its own, and only the heads are compared: thousands may wait, and one is chosen at each start.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Lane = TypeVar("Lane", bound=Hashable)


@dataclass(frozen=True)
class WaitingReward:
    """One reward that waits.

    Attributes:
        number: of its arrival.
        left: results until its group is decided; 0 = it is; None = it has no group.
        deadline: monotonic seconds; None = none.
    """

    number: int
    left: int | None = None
    deadline: float | None = None


def first(waiting: Iterable[WaitingReward]) -> WaitingReward | None:
    """The one to compute next; None when nothing waits. No group is like a group of one."""
    return min(waiting, key=_rank, default=None)


def _rank(one: WaitingReward) -> tuple[bool, int, float, int]:
    deadline = float("inf") if one.deadline is None else one.deadline
    return one.left == 0, 1 if one.left is None else one.left, deadline, one.number


@dataclass
class RewardQueue(Generic[Lane]):
    """Rewards that wait, in lanes whose members lack equally much until their group is decided."""

    _lanes: dict[Lane, list[tuple[float, int]]] = field(default_factory=dict)

    def put(self, lane: Lane, number: int, deadline: float | None = None) -> None:
        """One more waits; numbers grow with arrival."""
        due = float("inf") if deadline is None else deadline
        heapq.heappush(self._lanes.setdefault(lane, []), (due, number))

    def take(
        self, left: Callable[[Lane], int | None], startable: Callable[[Lane], bool]
    ) -> int | None:
        """Take the one to compute next; None where no lane that is ``startable`` has any.

        Args:
            left: results until the group of a lane is decided, as ``WaitingReward`` has it.
            startable: whether what waits in a lane may start.
        """
        lanes: dict[int, Lane] = {}
        heads: list[WaitingReward] = []
        for lane, waiting in self._lanes.items():
            if startable(lane):
                due, number = waiting[0]
                lanes[number] = lane
                heads.append(WaitingReward(number, left(lane), due))
        chosen = first(heads)
        if chosen is None:
            return None
        lane = lanes[chosen.number]
        heapq.heappop(self._lanes[lane])
        if not self._lanes[lane]:
            del self._lanes[lane]
        return chosen.number

    def clear(self) -> None:
        """Nobody waits any more."""
        self._lanes.clear()
