"""How many workers the queue asks for (pure): queue x median time / target.

A reward is promised its result ``target`` seconds after it was taken. The promise runs from that
moment and not from the next look: what has waited half of it has half of it left. So workers stay
as many as a burst asked for until it is done, and what comes meanwhile does not move its end.

Nobody waits for the reward of a group that still lacks others which are rolled out. It may take
``patience`` seconds more, or until it decides its group: then the target counts from there. So few
workers do most of the work while rollouts hide it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def promised_age(age: float, complete: float | None, patience: float) -> float:
    """The age by which the wish counts a reward; below 0 = its target has not begun.

    Args:
        age: seconds since it was taken.
        complete: seconds since its group lacks none but what was taken; None = others are to come.
        patience: seconds that it may take beyond the target while others are to come.
    """
    waited = age - patience
    return waited if complete is None else max(waited, min(age, complete))


def wish(ages: Iterable[float], p50: float | None, target: float, most: int) -> int:
    """Workers that finish what waits and runs, each within the target of when it was taken.

    Args:
        ages: of each reward that waits or runs (``promised_age``), in any order.
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
