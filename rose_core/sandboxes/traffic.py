"""Which checkpoints of a host run now: the earliest expected reply first, none against serving."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PLACES = 2
"""Checkpoints at the same time: each is mostly one processor's work, and agents run beside them."""
STARVED_SECONDS = 5.0
"""Whoever waits longer goes first: half of a median wait in recorded agents' traces (8 s)."""

_MEMORY_SHORT = 0.15
"""Part of the machine's memory: below it the next sandbox of 1 GiB may not fit on 8 GiB."""


@dataclass(frozen=True)
class CheckpointRequest:
    """A checkpoint that is wanted.

    Attributes:
        key: of the sandbox.
        asked: when its first turn without a record began, on the caller's clock.
        expected: when its reply is expected; None: not known, so it counts as now.
    """

    key: str
    asked: float
    expected: float | None = None


def admit(
    waiting: Iterable[CheckpointRequest], now: float, free: int, *, serving_burns: bool
) -> tuple[CheckpointRequest, ...]:
    """Those that begin now, in order.

    Args:
        waiting: all that are wanted and do not run.
        now: on the caller's clock.
        free: how many may begin.
        serving_burns: a serving replica of the node burns its budget: nobody begins, however late.
    """
    if serving_burns or free <= 0:
        return ()

    def order(request: CheckpointRequest) -> tuple[bool, float, float, str]:
        starved = now - request.asked >= STARVED_SECONDS
        until = request.expected if request.expected is not None else request.asked
        # The starved among themselves by age, or one of them could starve on.
        return not starved, request.asked if starved else until, request.asked, request.key

    return tuple(sorted(waiting, key=order)[:free])


def is_memory_short(free: float) -> bool:
    """Whether sandboxes wait for memory on a machine of which this part is free."""
    return free < _MEMORY_SHORT
