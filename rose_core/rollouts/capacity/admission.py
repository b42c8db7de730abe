"""How many turns may wait, in which order, and what to tell those who may not.

Trainers retry by themselves and badly (some 60 times at 1 s, some never), so the router queues
inside and refuses only when the queue is full or a turn has waited longer than the shortest client
time-out allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue.

    Attributes:
        most: turns that may wait; those that hold tokens already are not counted.
        seconds: longest wait; below the shortest client time-out (300 s is common).
    """

    most: int = 4096
    seconds: float = 240.0


def has_room(waiting: int, queue: QueueLimits, *, mine: int = 0, jobs: int = 1) -> bool:
    """Whether one more new turn may wait.

    Args:
        waiting: turns that wait.
        queue: the bounds.
        mine: how many of them are of the same job.
        jobs: jobs that have turns waiting; where there are several, a queue that is full of one
            job's turns still has room for the others' part of it.
    """
    return waiting < queue.most or (jobs > 1 and mine < queue.most // jobs)


def rank(holds_tokens: bool, priority: int, arrived: int) -> tuple[bool, int, int]:
    """Sort key of a waiting turn, smallest first.

    A turn that holds tokens goes first: its group waits for it, and its tokens age.
    """
    return (not holds_tokens, -priority, arrived)


def retry_after(waiting: int, finished_per_second: float) -> int:
    """Whole seconds after which a refused caller may find room; 1 to 30."""
    if finished_per_second <= 0:
        return 30
    # A tenth of the queue is room enough to be worth a try.
    return min(30, max(1, math.ceil(waiting / 10 / finished_per_second)))
