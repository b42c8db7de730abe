"""How many workers the queue asks for (pure): queue x median time / target.

A reward is promised its result ``target`` seconds after it was taken. The promise runs from that
moment and not from the next look: what has waited half of it has half of it left. So workers stay
as many as a burst asked for until it is done, and what comes meanwhile does not move its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def wish(ages: Iterable[float], p50: float | None, target: float, most: int) -> int:
    """Workers that finish what waits and runs, each within the target of when it was taken.

    Args:
        ages: seconds since each reward that waits or runs was taken, in any order.
        p50: median seconds of one; None while none has ended.
        target: seconds in which a reward should have its result.
        most: never more.

    Returns:
        0 for an empty queue, otherwise 1 to ``most``. While nothing is known of the time, one
        worker finds it out.
    """
    oldest = sorted(ages, reverse=True)
    if not oldest or not most:
        return 0
    if p50 is None:
        return 1
    wanted = 1
    for number, age in enumerate(oldest, start=1):
        # The first so many are due by then. One that is late already still takes its own time.
        left = max(p50, target - age)
        needed = number * p50 / left if left > 0 else float(number)
        # A figure such as 3.0000000000000004 asks for three.
        wanted = max(wanted, math.ceil(min(needed, float(number)) - 1e-9))
    return min(most, len(oldest), wanted)
