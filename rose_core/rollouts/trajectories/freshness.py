"""How long a trajectory has until it is too old to train on.

A trajectory may be consumed while the head is at most ``most`` publishes newer than the version it
began with; the time left is what the publishes until then take, less what has passed since the
last. Both come from the heads that the router hears of. Mapped to the trainers' own words: verl's
``max_off_policy_threshold``, AReaL's ``max_staleness`` and prime-rl's ``max_off_policy_steps`` are
``most``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.versions import age, lag


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often the run publishes.

    Attributes:
        head: newest version heard of.
        since: when it was heard of first, in seconds of the router's clock.
        seconds: between two publishes; infinite before two were seen.
    """

    head: WeightVersion | None = None
    since: float = 0.0
    seconds: float = math.inf

    def observe(self, head: WeightVersion | None, now: float, weight: float = 0.3) -> Cadence:
        """Take the head as it is now, and learn from its change."""
        if head is None or head == self.head:
            return self
        steps = lag(self.head, head) if self.head is not None else None
        if not steps:
            return Cadence(head, now)  # the first published, or another incarnation of the run
        took = (now - self.since) / steps
        mean = took if math.isinf(self.seconds) else self.seconds + weight * (took - self.seconds)
        return replace(self, head=head, since=now, seconds=mean)


def budget_seconds(
    began_with: WeightVersion | None, most: int | None, cadence: Cadence, now: float
) -> float:
    """Time left for a trajectory.

    Args:
        began_with: the newest version when it began.
        most: publishes it may be old when it is consumed; ``None`` = no bound.
        cadence: of the run.
        now: seconds of the router's clock.

    Returns:
        Seconds, negative when it is too late; infinite while there is nothing to tell by.
    """
    if most is None or began_with is None or cadence.head is None or math.isinf(cadence.seconds):
        return math.inf
    behind = age(began_with, cadence.head)
    if behind is None:
        return -math.inf  # it belongs to an incarnation that is over
    return (most + 1 - behind) * cadence.seconds - (now - cadence.since)
