"""The guard's tick: a step at least every so often, put off by whoever has just caused one.

The tap's heartbeat comes a little more often than every second tick is due and wakes the guard
anyway, so with a living tap one waking does both; without one the timer does. While everything is
at rest (no permit to extend, no deadline runs) every second tick is enough.

| running | then | next step is due |
|---|---|---|
| ``beat``, the last step was long ago | step | a period later; two at rest |
| ``beat``, a step was made just now | | as before |
| ``stir`` | | a period later at most |
| the timer | step | a period later; two at rest |
| a step fails | ``run`` raises it: a guard that cannot step must end | never |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    """Steps until ``run`` is cancelled; single-threaded.

    Args:
        step: the work; tells whether everything is at rest now.
        seconds: longest time between two steps.
    """

    def __init__(self, step: Callable[[], bool], seconds: float) -> None:
        self._step, self._seconds = step, seconds
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] | None = None
        self._stepped_s = 0.0

    async def run(self) -> None:
        """Step now and from now on.

        Raises:
            Exception: whatever a step raised.
        """
        self._failed = asyncio.get_running_loop().create_future()
        try:
            self._work()
            await self._failed
        finally:
            self._failed = None
            if self._timer is not None:
                self._timer.cancel()

    def beat(self) -> bool:
        """Somebody else has woken the loop: step now, unless that was done a moment ago."""
        if self._failed is None or self._failed.done():
            return False
        pause = 2 * self._seconds if self._resting else self._seconds
        due = asyncio.get_running_loop().time() - self._stepped_s >= pause / 2
        if due:
            self._work()
        return due

    def stir(self) -> None:
        """Not everything is at rest any more: no two periods now."""
        if self._resting and self._failed is not None and not self._failed.done():
            self._resting = False
            self._arm()

    def _work(self) -> None:
        self._stepped_s = asyncio.get_running_loop().time()
        try:
            self._resting = self._step()
        except Exception as error:  # noqa: BLE001  # raised again by ``run``
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)
            return
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        pause = 2 * self._seconds if self._resting else self._seconds
        self._timer = asyncio.get_running_loop().call_later(pause, self._work)
