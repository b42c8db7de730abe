"""When a process tree that may not compute is frozen, and when it is left to stop by itself.

A freeze stops every thread wherever it stands. On a GPU that may be inside the driver: one that is
stopped while it allocates, captures a graph or loads a kernel can hold a lock that serving, a
client of the same driver, needs. So the permit comes first: the engine ends what it has begun, and
says at its boundary that it rests. It is frozen there. It says so in a file of its own
(``rose_engines.node.activity``), and it is believed no further than a stated time:

| the engine | since it may not compute | then |
|---|---|---|
| says nothing: it uses no driver, or has not come that far | any time | freeze |
| rests at a boundary or a checkpoint | any time | freeze |
| computes an iteration | less than ``iteration_ns`` | wait |
| computes an iteration | longer, or nobody else holds the brake (``hurried``) | freeze |
| the same over several GPUs | less than ``iteration_ns`` | wait, also where hurried |
| the same over several GPUs | longer | end it: the others' kernels would spin for a frozen one |
| starts: loads, allocates, captures | less than ``start_ns`` | wait for its next checkpoint |
| starts | longer | end it: a process that is gone holds no lock |

Pure, and the only place where this is decided: the engine host's enforcer and the guard's own
freezer both ask it. Next step: ``rose_agent.host.enforcement.tree``,
``rose_agent.guard.slots.freezer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Activity(IntEnum):
    """What an engine reports that it does; the numbers of ``rose_engines.node.activity``."""

    UNREPORTED = 0
    STARTING = 1
    ITERATING = 2
    RESTING = 3
    ITERATING_TOGETHER = 4


class FreezeStep(StrEnum):
    """What is done to a tree that may not compute."""

    WAIT = "Wait"
    FREEZE = "Freeze"
    END = "End"


@dataclass(frozen=True)
class Grace:
    """How long an engine is believed, nanoseconds.

    Attributes:
        iteration_ns: a decode step of a large model takes 5 to 20 ms on a GPU. With the longest
            wait for anybody's death (a dead tap: 200 ms, and 20 ms for the enforcer) it keeps the
            promise of 250 ms.
        start_ns: the longest single step of a start is the capture of one graph with warm kernel
            caches, about a second; the guard's own patience with a late tree is 5.25 s.
    """

    iteration_ns: int = 20_000_000
    start_ns: int = 5_000_000_000


def next_step(
    activity: Activity, stopped_ns: int, grace: Grace = Grace(), *, hurried: bool = False
) -> FreezeStep:
    """What to do now; see the table of the module.

    Args:
        activity: as the engine reports it.
        stopped_ns: time since it may not compute.
        grace: how long it is believed.
        hurried: nobody else is left who would stop it in time.
    """
    if activity is Activity.STARTING:
        return FreezeStep.WAIT if stopped_ns < grace.start_ns else FreezeStep.END
    if activity is Activity.ITERATING_TOGETHER:
        return FreezeStep.WAIT if stopped_ns < grace.iteration_ns else FreezeStep.END
    if activity is Activity.ITERATING and not hurried and stopped_ns < grace.iteration_ns:
        return FreezeStep.WAIT
    return FreezeStep.FREEZE
