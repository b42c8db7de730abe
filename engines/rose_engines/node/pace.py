"""Courtesy: work beside serving takes a small share of a core while serving is busy.

A closed permit means that serving has no slack. Staging a bundle then goes on, so that it lies
ready when the permit opens, but after every piece of work it rests for several times as long as the
piece took of a core. It rests no longer once the permit is open. An engine that is frozen, or whose
cgroup has a quota for such times (engine host, ``--engine-busy-cpu-percent``), is held by that too.

The engine's own thread comes first as well (``give_way``): a version may take a second longer, but
a stream should lose no token's time by it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

SHARE = 0.2
"""Of a core, while serving is busy."""

LONGEST_SECONDS = 0.5
"""One rest; a piece of work that took unusually long is not paid for at once."""

NICE = 10
"""Above the engine's. A ninth of its weight where every core is taken: a version still comes, and
nine more (19) took no less from a stream."""

_LOOK_SECONDS = 0.02


def give_way(engine: int) -> None:
    """Have the calling thread compute while the engine's does not; for ever, and once.

    Args:
        engine: process of the engine, whose first thread computes; that one itself never gives way.
    """
    own = threading.get_native_id()
    wanted = min(19, os.getpriority(os.PRIO_PROCESS, engine) + NICE)
    if own != engine and os.getpriority(os.PRIO_PROCESS, own) < wanted:
        os.setpriority(os.PRIO_PROCESS, own, wanted)


def rest_of(worked_seconds: float, share: float = SHARE) -> float:
    """How long to rest after a piece of work."""
    return min(LONGEST_SECONDS, max(0.0, worked_seconds) * (1.0 / share - 1.0))


class Pace:
    """Rests between the pieces of one thread's work.

    Args:
        busy: whether serving is busy now.
        worked: this thread's time on a core; standing still costs nothing.
        sleep: tests give their own.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._busy = busy
        self._worked = worked
        self._sleep = sleep
        self._since = worked()

    def busy(self) -> bool:
        """Whether serving is busy now."""
        return self._busy()

    def rest(self) -> None:
        """A piece of work is done."""
        left = rest_of(self._worked() - self._since)
        while left > 0 and self._busy():
            self._sleep(min(left, _LOOK_SECONDS))
            left -= _LOOK_SECONDS
        self._since = self._worked()
