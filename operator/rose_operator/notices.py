"""Tells nodes that their grants have changed, so that they ask at once instead of at their period.

A notice carries nothing: what a node may do comes from ``Sync`` alone, whose deadline counts from
the node's own request. A lost notice costs one period.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from rose_core.wire.sync import Notice, NoticeRequest


class Notices:
    """The nodes that listen."""

    def __init__(self) -> None:
        self._listening: dict[str, set[asyncio.Event]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._listening.values()))

    def notify(self, nodes: Iterable[str]) -> None:
        """These nodes' grants have changed."""
        for node in nodes:
            for event in self._listening.get(node, ()):
                event.set()

    async def follow(self, request: NoticeRequest) -> AsyncGenerator[Notice, None]:
        """One notice per change, changes in quick succession as one, for as long as it listens."""
        event = asyncio.Event()
        events = self._listening.setdefault(request.node, set())
        events.add(event)
        try:
            while True:
                await event.wait()
                event.clear()
                yield Notice()
        finally:
            events.discard(event)
            if not events:
                self._listening.pop(request.node, None)
