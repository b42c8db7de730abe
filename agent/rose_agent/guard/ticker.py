"""The guard's tick: a step at least once per period, from the tap's heartbeat or from a timer.

Waking up is what costs, so the heartbeat of a living tap, which wakes the guard anyway, replaces
the timer. Without a tap the timer ticks. While everything is at rest (no permit to extend, no
deadline runs) every second tick is enough. Next step: ``loop`` has the step.

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


class Ticker:
    """Calls ``step`` until ``run`` is cancelled; single-threaded.

    Args:
        step: the work; returns whether everything is at rest now.
        seconds: longest time between two steps.
    """

    def __init__(self, step: Callable[[], bool], seconds: float) -> None:
        self._step, self._seconds = step, seconds
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] | None = None
        self._stepped_s = 0.0

    async def run(self) -> None:
        """Step now, and again at every tick.

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
        """The loop is awake anyway: step, unless one was made a moment ago; whether it did."""
        if self._failed is None or self._failed.done():
            return False
        pause = 2 * self._seconds if self._resting else self._seconds
        due = asyncio.get_running_loop().time() - self._stepped_s >= pause / 2
        if due:
            self._work()
        return due

    def stir(self) -> None:
        """Something is not at rest any more: the next step is due after one period, not two."""
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
