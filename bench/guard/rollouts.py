"""The rollout load: long generations without an end, counted token by token on the client's clock.

They run through the whole benchmark; the gate under test decides when they get on.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time

import aiohttp

from bench.guard.dialects import SGLANG, Dialect

STREAMS = 4
_OUTPUT = 400


class Rollouts:
    """Keeps ``STREAMS`` generations running until cancelled.

    Attributes:
        url: of the engine; another one once that has ended.
        halved: half of the streams rest, as the paper's emergency cut leaves them.
        lost: tokens of trajectories that were aborted, by the time of the abort.
        ended: trajectories that are over, however they ended.
    """

    def __init__(self, url: str, streams: int = STREAMS, dialect: Dialect = SGLANG) -> None:
        self.url, self._streams, self._dialect = url, streams, dialect
        self._times: list[float] = []
        self._totals: list[int] = [0]
        self._running: dict[int, tuple[asyncio.Task[None], int]] = {}
        self.halved = False
        self.ended = 0
        self.lost: list[tuple[float, int]] = []

    async def run(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            await asyncio.gather(*(self._stream(http, n) for n in range(self._streams)))

    async def _stream(self, http: aiohttp.ClientSession, number: int) -> None:
        while True:
            if self.halved and number >= self._streams // 2:
                await asyncio.sleep(0.02)
                continue
            task = asyncio.create_task(self._trajectory(http, number))
            self._running[number] = (task, 0)
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                self.ended += 1
            await asyncio.sleep(0.02)

    async def _trajectory(self, http: aiohttp.ClientSession, number: int) -> None:
        body, path = self._dialect.body([10 + number] * 64, _OUTPUT), self._dialect.path
        with contextlib.suppress(aiohttp.ClientError):
            async with http.post(f"{self.url}{path}", json=body) as answer:
                seen = 0
                async for line in answer.content:
                    tokens = self._dialect.count(line, seen)
                    if tokens > seen:
                        self._note(tokens - seen)
                        seen = tokens
                        self._running[number] = (self._running[number][0], seen)

    def _note(self, tokens: int) -> None:
        self._times.append(time.monotonic())
        self._totals.append(self._totals[-1] + tokens)

    def halve(self) -> None:
        """Abort half of the trajectories, and keep their streams at rest."""
        if self.halved:
            return
        self.halved = True
        for number in range(self._streams // 2, self._streams):
            task, tokens = self._running[number]
            self.lost.append((time.monotonic(), tokens))
            task.cancel()

    def made(self, since_s: float, until_s: float) -> int:
        """Tokens that arrived in the interval and were not lost by an abort in it."""
        low = bisect.bisect_left(self._times, since_s)
        high = bisect.bisect_left(self._times, until_s)
        lost = sum(tokens for moment, tokens in self.lost if since_s <= moment < until_s)
        return max(0, self._totals[high] - self._totals[low] - lost)

    def last_before(self, since_s: float, until_s: float) -> float | None:
        """The interval's last token."""
        index = bisect.bisect_left(self._times, until_s) - 1
        found = self._times[index] if index >= 0 else 0.0
        return found if found >= since_s else None

    def first_after(self, since_s: float) -> float | None:
        """The first token from then on."""
        index = bisect.bisect_left(self._times, since_s)
        return self._times[index] if index < len(self._times) else None
