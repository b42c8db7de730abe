"""Which finished groups a trainer had better take next, so that none becomes too old to train on.

A trainer that takes groups as they finish takes the short ones: it publishes, and what is long is
too old when it ends. That is a filter by length, and the faster the fleet the harder it bites,
whoever owns the GPUs. With a bound of ``staleness`` publishes, a group that began with version
``v`` must be in a batch that is taken at version ``v + staleness`` or before, so:

    due(c) = groups that began with version c or before, ready or under way
             - batch * (c + staleness - version)        what later batches can still hold of them

A batch takes the oldest that are ready. It waits while, for some ``c``, it holds fewer than
``due(c)`` groups that began with ``c`` or before; then the next batches could not make up for it.
What is too old already is the trainer's to drop and does not count here.

Pure; the trainer (or ``simulate.job``) keeps the groups and asks whenever one ends or a step does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rose_core.rollouts.errors import InvalidBound


@dataclass(frozen=True, slots=True)
class ConsumptionBound:
    """A trainer's sizes.

    Attributes:
        batch: groups of a training step.
        staleness: publishes a group may be old when it is taken.
    """

    batch: int
    staleness: int

    def __post_init__(self) -> None:
        """Refuse sizes that no trainer could have."""
        if self.batch < 1 or self.staleness < 0:
            message = f"batch {self.batch} must be at least 1, staleness {self.staleness} 0 or more"
            raise InvalidBound(message)


def next_batch(
    ready: Sequence[int], under_way: Sequence[int], version: int, bound: ConsumptionBound
) -> tuple[int, ...]:
    """The groups to train on now.

    Args:
        ready: oldest version of every group that is finished and not too old.
        under_way: version that every other group began with.
        version: of the trainer now.
        bound: sizes.

    Returns:
        Indexes into ``ready``, ``bound.batch`` of them, oldest first and then as they finished;
        empty = wait.
    """
    order = sorted(range(len(ready)), key=ready.__getitem__)[: bound.batch]
    if len(order) < bound.batch:
        return ()
    taken = [ready[index] for index in order]
    every = sorted([*ready, *(one for one in under_way if one >= version - bound.staleness)])
    # Below the newest version that is short of room, an older one may be shorter still: ask each.
    for newest in sorted(set(every)):
        later = bound.batch * (newest + bound.staleness - version)
        due = bisect_right(every, newest) - later
        if bisect_right(taken, newest) < min(due, bound.batch):
            return ()
    return tuple(order)
