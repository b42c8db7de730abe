"""Keeps the head of a run known; a store that is away costs nothing but news.

Between us and the store stands a relay, and between them what may lose a connection without a word.
A watch that has been silent for long is begun anew: it begins with the head, so whatever was lost
costs this silence. Next step: ``follower`` acts on what is known here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from rose_agent.weightsync.decide import Head
from rose_core.wire.sync import WeightSource
from rose_weights.errors import WeightsError
from rose_weights.receive.client import WeightsClient
from rose_wire.errors import WireError

_RECONNECT_SECONDS = 1.0


class Heads:
    """The head of one run.

    Args:
        source: endpoint and run.
        silence_seconds: a watch that has brought nothing for so long is begun anew.
        news: called whenever ``head`` or ``error`` may have changed.

    Attributes:
        head: None until it is known.
        error: why nothing newer can be known now; empty while the watch goes on.
    """

    def __init__(
        self, source: WeightSource, silence_seconds: float, news: Callable[[], None]
    ) -> None:
        self._source = source
        self._silence = silence_seconds
        self._news = news
        self._encoded = ("", 0.0)
        self.head: Head | None = None
        self.error = ""

    @property
    def label(self) -> str:
        """The head's label; empty until it is known."""
        return str(self.head.version) if self.head else ""

    def encode_seconds(self, version: str) -> float | None:
        """What encoding a version took its publisher; None unless it is the head, and told."""
        head, seconds = self._encoded
        return seconds if head == version and seconds else None

    async def watch(self, store: WeightsClient) -> None:
        """Watch until cancelled."""
        while True:
            try:
                description = await store.describe(self._source.run)
                if description.head is None:
                    self._tell(f"run {self._source.run} has no published version yet")
                if await self._follow(store):
                    continue
                self._tell("the store ended the watch")
            except (WeightsError, WireError) as error:
                self._tell(f"weight store {self._source.endpoint}: {error}")
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _follow(self, store: WeightsClient) -> bool:
        """Note every head that a watch brings; True when it was silent and is to be renewed."""
        async with contextlib.aclosing(store.watch(self._source.run)) as heads:
            while True:
                try:
                    async with asyncio.timeout(self._silence):
                        info = await anext(heads, None)
                except TimeoutError:
                    return True
                if info is None:
                    return False
                self.head = Head(info.version, info.digest)
                self._encoded = (str(info.version), info.encode_seconds)
                self._tell("")

    def _tell(self, error: str) -> None:
        self.error = error
        self._news()
