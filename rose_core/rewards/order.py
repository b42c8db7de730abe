"""Which reward is computed next (pure): the one that completes a group.

A trainer waits for whole groups. The members of one that lacks few are worth more than those of
one that has just begun; among equals the earlier deadline goes first, then the earlier arrival.
Last go those whose group is decided without them (``groups``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
