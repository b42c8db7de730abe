"""Which batch's line goes next (pure): tenants in turn, of one tenant's the nearest deadline.

Deadlines alone would let who names the shortest window keep all others from the engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class WaitingBatch:
    """A batch that has a line to send.

    Attributes:
        name: its id.
        tenant: whose it is.
        deadline: Unix seconds.
        running: lines of its tenant under way.
    """

    name: str
    tenant: str
    deadline: float
    running: int


def next_batch(waiting: Iterable[WaitingBatch]) -> str | None:
    """The id of the batch whose line goes next; None when none waits."""
    chosen = min(
        waiting, key=lambda one: (one.running, one.deadline, one.tenant, one.name), default=None
    )
    return None if chosen is None else chosen.name
