"""How many workers the queue asks for (pure)."""

from __future__ import annotations

import math


def wish(queue: int, p50: float | None, target: float, most: int) -> int:
    """Workers that finish what waits and runs within the target.

    Args:
        queue: rewards that wait or run.
        p50: median seconds of one; None while none has ended.
        target: seconds in which the last of them should have its result.
        most: never more.

    Returns:
        0 for an empty queue, otherwise 1 to ``most``. While nothing is known of the time, one
        worker finds it out.
    """
    if not queue or not most:
        return 0
    if p50 is None:
        return 1
    return max(1, min(most, queue, math.ceil(queue * p50 / target)))
