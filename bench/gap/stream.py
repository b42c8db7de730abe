"""One stream beside a switch, and how much of its time the switch took."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rose_engines.sglang.client import SGLangClient

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3000}
_BEFORE, _AFTER = 16, 3
_END_SECONDS = 20.0
_ids = itertools.count()


class StreamEnded(Exception):
    """A stream ended before it had what was to be measured."""


@dataclass
class Stream:
    """Times at which tokens arrived, seconds of the monotonic clock."""

    times: list[float] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: bool = False

    async def read(self, client: SGLangClient, rid: str) -> None:
        """Read until aborted."""
        async for _ in client.stream([104], GREEDY, logprobs=False, rid=rid):
            self.times.append(time.monotonic())
            self._news.set()

    def end(self) -> None:
        """No token comes any more."""
        self._ended = True
        self._news.set()

    async def more(self, tokens: int) -> None:
        """Wait for so many further tokens.

        Raises:
            StreamEnded: they never come.
        """
        wanted = len(self.times) + tokens
        while len(self.times) < wanted:
            if self._ended:
                message = f"the stream ended after {len(self.times)} tokens; see the engine's log"
                raise StreamEnded(message)
            self._news.clear()
            await self._news.wait()


@asynccontextmanager
async def running(client: SGLangClient) -> AsyncIterator[Stream]:
    """A stream that runs steadily by now; it is aborted at the end."""
    rid = f"gap-{next(_ids):06d}."
    stream = Stream()
    reader = asyncio.create_task(stream.read(client, rid))
    reader.add_done_callback(lambda _: stream.end())
    try:
        await stream.more(_BEFORE)
        yield stream
    finally:
        await client.abort(rid)
        await asyncio.wait_for(reader, _END_SECONDS)


async def gap(client: SGLangClient, switch: Callable[[], Awaitable[None]]) -> float:
    """Milliseconds that a stream waits for tokens because of the switch."""
    async with running(client) as stream:
        began = time.monotonic()
        await switch()
        ended = time.monotonic()
        await stream.more(_AFTER)
        return 1e3 * lost(stream.times, began, ended)


def lost(times: Sequence[float], began: float, ended: float) -> float:
    """Seconds beyond the usual pace, over all intervals that the switch touches.

    Tokens that come sooner than usual count against those that come later: otherwise a long switch
    would be charged for the jitter of every token beside it.

    Args:
        times: arrivals of tokens.
        began: of the switch; the pace is that of the tokens before.
        ended: of the switch.
    """
    intervals = list(itertools.pairwise(times))
    pace = statistics.median(after - before for before, after in intervals if after <= began)
    touched = [(a, b) for a, b in intervals if b > began and a < ended]
    return sum(after - before - pace for before, after in touched)
