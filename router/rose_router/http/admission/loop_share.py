"""What of the event loop's time one kind of work may take, so that turns beside it go on.

Work that callers can ask for without end is done in slices. After each one it pays for the time
that it took, and waits while its kind has had more than its share. Work that cannot be sliced waits
before it is done, one after the other, or many who come at once would not wait for each other. What
comes seldom waits for nothing: a burst is free. This is the generic cell rate algorithm (ITU-T
I.371, a leaky bucket as a meter), with seconds of the loop as cells: those who pay queue up in the
order in which they came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Done = TypeVar("Done")


class LoopShare:
    """A share of an event loop's time.

    Args:
        part: of any second, what this kind of work may take in the long run; in (0, 1].
        burst_seconds: of the loop's time that may be taken at once.
    """

    def __init__(self, part: float, burst_seconds: float) -> None:
        self._part = part
        self._burst = burst_seconds / part
        self._free = 0.0  # when all that was taken so far is paid for
        self._turn = asyncio.Lock()

    def charge(self, seconds: float, now: float) -> float:
        """Count work of ``seconds``; the seconds to wait before there is more of its kind."""
        self._free = max(self._free, now) + seconds / self._part
        return max(0.0, self._free - now - self._burst)

    async def pay(self, seconds: float, limit: asyncio.Timeout | None = None) -> None:
        """Count work of ``seconds``; gives way to others, and waits while it is too much.

        Args:
            seconds: of the loop's time, that the work took.
            limit: of what a caller may take; the wait is not his.
        """
        now = asyncio.get_running_loop().time()
        wait = self.charge(seconds, now)
        if limit is not None and (when := limit.when()) is not None:
            limit.reschedule(when + wait)
        await asyncio.sleep(wait)

    async def hold(self, work: Callable[[], Done]) -> Done:
        """Do work for which everybody waits, once more of its kind may be done; count it."""
        async with self._turn:
            await self.pay(0.0)
            began = time.perf_counter()
            try:
                return work()
            finally:
                taken = time.perf_counter() - began
                self.charge(taken, asyncio.get_running_loop().time())
