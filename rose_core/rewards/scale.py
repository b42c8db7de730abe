"""How many workers the queue asks for (pure): queue x median time / target.

A reward is promised its result ``target`` seconds after it was taken. The promise runs from that
moment and not from the next look: what has waited half of it has half of it left. So workers stay
as many as a burst asked for until it is done, and what comes meanwhile does not move its end.

A reward that runs counts for what is left of it. Its worker finishes it also when it is told to go
and ends then, so workers that have nothing more to do are let go while they are still busy, and
not after they have stood idle until the next look. From then on its reward counts no more: nobody
else has work by it, and its worker is none of those that are wished for. One that runs far beyond
the median keeps its worker while others wait: where rewards are of two lengths the few that are
left may all be busy.

Once nothing waits and a worker has nothing to do, nobody is wished for: those that work finish what
they have and go. All stay where as many rewards are expected before a new worker could be ready
(``demand``): to stand idle for that long costs what a cold start costs, so this is the break-even
of renting skis.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

# Rewards expected within a cold start, for each worker that has nothing to do: as likely as not.
_LIKELY = 0.5
# Of the median. What has run for longer is of another kind, of which the median says nothing: its
# worker does not come back for what waits. Lengths that lie within a fifth of each other have none.
_FAR_BEYOND = 2.0


def promised_age(age: float, complete: float | None, patience: float) -> float:
    """The age by which the wish counts a reward; below 0 = its target has not begun.

    Args:
        age: seconds since it was taken.
        complete: seconds since its group lacks none but what was taken; None = others are to come.
        patience: seconds that it may take beyond the target while others are to come.
    """
    waited = age - patience
    return waited if complete is None else max(waited, min(age, complete))


def wish(
    ages: Iterable[float],
    p50: float | None,
    target: float,
    most: int,
    running: Collection[float] = (),
    *,
    idle: int = 0,
    expected: float = 0.0,
) -> int:
    """Workers that finish what waits and runs, each within the target of when it was taken.

    Args:
        ages: of each reward that waits (``promised_age``), in any order.
        p50: median seconds of one; None while none has ended.
        target: seconds in which a reward should have its result.
        most: never more.
        running: seconds for which each reward has been verified that runs on a worker which stays.
        idle: workers that are there and have nothing to do.
        expected: rewards that are to come before a new worker could be ready.

    Returns:
        0 where nothing waits or runs, or workers have nothing to do and nothing is expected for
        them; otherwise 1 to ``most``. While nothing is known of the time, one worker finds it out.
    """
    oldest = sorted(ages, reverse=True)
    nothing_to_start = not oldest and (idle > 0 or not running)
    if not most or (nothing_to_start and (not idle or expected < _LIKELY * idle)):
        return 0
    if p50 is None:
        return 1
    under_way = sum(max(p50 - verified, 0.0) for verified in running)
    kept = sum(verified > _FAR_BEYOND * p50 for verified in running) if oldest else 0
    wanted = 0.0
    for number, age in enumerate((0.0, *oldest)):
        # The first so many are due by then. One that is late already still takes its own time.
        left = max(p50, target - age)
        needed = kept + ((number * p50 + under_way) / left if left > 0 else float(number))
        wanted = max(wanted, min(needed, float(number + len(running))))
    # The nearest number: a fraction of a worker's work is sooner done by those that are there than
    # by one more, which takes a cold start and ends idle.
    return max(1, min(most, len(oldest) + len(running), math.floor(wanted + 0.5)))
