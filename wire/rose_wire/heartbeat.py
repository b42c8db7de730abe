"""Calls that end within seconds when who is called has fallen silent, however long they may take.

While somebody waits, the other process is asked beside the call whether it lives. What counts is
decided in ``rose_core.sandboxes.heartbeats``. A call that ends before the first question costs
nothing; one to a process that was silent last asks first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

from rose_core.sandboxes.heartbeats import Heartbeats


class FellSilent(TimeoutError):
    """Who is called does not say that it lives."""


class Heartbeat:
    """Of one process that is called.

    Args:
        ask: returns when it has answered; raises ``aiohttp.ClientError`` or ``OSError`` where it
            cannot be asked.
        beats: how often.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        beats: Heartbeats = Heartbeats(),  # noqa: B008 - frozen
    ) -> None:
        self._ask, self._beats = ask, beats
        self._waits: set[asyncio.Timeout] = set()
        self._watch: asyncio.Task[None] | None = None
        self._silent = False

    @asynccontextmanager
    async def waited_for(self) -> AsyncIterator[None]:
        """A block in which it is waited for.

        Raises:
            FellSilent: it says nothing; the block was cut short, or was not begun.
        """
        if self._silent:
            if not await self.answers():
                raise FellSilent("it does not say that it lives")
            self._silent = False
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                if self._watch is None:
                    self._watch = asyncio.create_task(self._ask_until_lost())
                yield
        except TimeoutError as error:
            if not wait.expired():
                raise
            missed = f"{self._beats.most_missed} questions in a row are not answered"
            raise FellSilent(f"it does not say that it lives: {missed}") from error
        finally:
            self._waits.discard(wait)
            if not self._waits and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def answers(self) -> bool:
        """Whether it answers now, within the time of a question."""
        try:
            async with asyncio.timeout(self._beats.within):
                await self._ask()
        except (aiohttp.ClientError, OSError):  # a time-out is one
            return False
        return True

    async def _ask_until_lost(self) -> None:
        missed = 0
        while not self._beats.is_lost(missed):
            await asyncio.sleep(self._beats.every)
            missed = 0 if await self.answers() else missed + 1
        self._silent, self._watch = True, None
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)
