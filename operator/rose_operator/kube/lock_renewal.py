"""The leader lock on a thread of its own, so that no renewal waits for a busy loop.

Passes, agents' calls and watches share the main loop. On an overloaded machine a renewal that
queued behind them came too late: the lead lapsed in the middle of a pass, and no lease was served
until the load was gone. The thread has its own loop and its own connections.

A thread that renews whatever happens would let a hung operator lead for ever. So the main loop
beats once a second, and without a beat for as long as the Lease lasts nothing is renewed: the
follower takes over, and grants go on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

from rose_operator.errors import OperatorError
from rose_operator.kube.leader import LeaderLock

_log = logging.getLogger(__name__)
_BEAT_SECONDS = 1.0
_RELEASE_SECONDS = 3.0


class LockRenewal:
    """Runs a lock.

    Args:
        lock: its state may be read from anywhere; everything else happens in the thread.
        close: ends the connections of the lock's client, in the thread.
        clock: monotonic seconds.
        stuck_seconds: without a beat for so long, nothing is renewed.
    """

    def __init__(
        self,
        lock: LeaderLock,
        close: Callable[[], Awaitable[None]],
        *,
        clock: Callable[[], float],
        stuck_seconds: float,
    ) -> None:
        self._lock, self._close, self._clock = lock, close, clock
        self._stuck_seconds = stuck_seconds
        self._beat_at = clock()
        self._stop = threading.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Renew until deposed; cancelled, it leaves the lock to ``release``."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                asyncio.run(self._renew())
            finally:
                loop.call_soon_threadsafe(self._ended.set)

        threading.Thread(target=work, name="leader-lock", daemon=True).start()
        while not self._ended.is_set():
            self.beat()
            try:
                async with asyncio.timeout(_BEAT_SECONDS):
                    await self._ended.wait()
            except TimeoutError:
                continue

    def beat(self) -> None:
        """The main loop turns."""
        self._beat_at = self._clock()

    def is_alive(self) -> bool:
        """Whether the main loop has turned lately; asked before every renewal."""
        silent = self._clock() - self._beat_at
        if silent > self._stuck_seconds:
            _log.error("the loop has not turned for %.0f s: the lead is left to another", silent)
        return silent <= self._stuck_seconds

    async def release(self) -> None:
        """Give the lead back; call it when nothing writes any more."""
        self._stop.set()
        try:
            async with asyncio.timeout(2 * _RELEASE_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("the leader lock does not end")

    async def _renew(self) -> None:
        renewing = asyncio.create_task(self._lock.run(self.is_alive))
        asked = asyncio.create_task(asyncio.to_thread(self._stop.wait))
        await asyncio.wait([renewing, asked], return_when=asyncio.FIRST_COMPLETED)
        try:
            if renewing.done():
                await renewing
            else:
                await self._give_back(renewing)
        finally:
            self._stop.set()
            await self._close()

    async def _give_back(self, renewing: asyncio.Task[None]) -> None:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._lock.release()
        except (OperatorError, TimeoutError) as error:
            _log.warning("leader Lease not given back: %s", error)
