"""How long a verification may take, learned from those of correct answers (RollPacker's rule).

A wrong answer may run for ever; a correct one takes about as long as the other correct ones of its
task. What takes far longer is hopeless and is stopped, so that its worker serves the next.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from rose_core.stats import quantile

# So many correct answers of a task are seen before a limit is drawn from them.
LEAST = 8
_REMEMBERED = 64
# Room above the slowest correct one: what a machine under load adds.
_ROOM = 2.0
# Under a second the noise of the machine is larger than the answer's own time.
_FLOOR_SECONDS = 1.0
# Dean and Barroso's: a copy of what takes longer than this share costs the rest in work, 5 %.
_LATE = 0.95
_MOST_TASKS = 10_000


class TimeLimits:
    """Time limits by function and task; the least recently used task is forgotten first."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        self._late: dict[tuple[str, str], float] = {}  # asked for much more often than learned

    def limit(self, function: str, task: str, most: float) -> float:
        """Seconds that a verification may take.

        Args:
            function: that verifies.
            task: whose answer it is; empty = unknown, and nothing is known of how long it takes.
            most: the function's own limit; holds while too little is known, and above all.
        """
        seen = self._seen.get((function, task))
        if seen is None or len(seen) < LEAST:
            return most
        return min(most, max(_FLOOR_SECONDS, _ROOM * max(seen)))

    def late_after(self, function: str, task: str) -> float | None:
        """Seconds after which a verification is late: 95 of 100 correct answers took no longer.

        At least a second, because the start of another worker may take that. None while too
        little is known.
        """
        return self._late.get((function, task))

    def learn(self, function: str, task: str, seconds: float) -> None:
        """A correct answer took so long to be verified; without a task it tells of no other."""
        if not task:
            return
        key = (function, task)
        seen = self._seen.setdefault(key, deque(maxlen=_REMEMBERED))
        seen.append(seconds)
        self._seen.move_to_end(key)
        if len(seen) >= LEAST:
            self._late[key] = max(_FLOOR_SECONDS, quantile(seen, _LATE))
        if len(self._seen) > _MOST_TASKS:
            forgotten, _ = self._seen.popitem(last=False)
            self._late.pop(forgotten, None)
