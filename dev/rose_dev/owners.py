"""Plays an engine's owner for tests and benchmarks: one ATTACH stream that says what it is told.

The real owners are the guard and the host of a dedicated engine; the router cannot tell them apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from rose_core.wire.routing import EngineUpdate, RouterNote
from rose_wire.rpc import connect, converse
from rose_wire.services import ATTACH


@dataclass
class Owner:
    """One stream.

    Attributes:
        update: what was said last.
        notes: what the router answered.
    """

    update: EngineUpdate
    notes: list[RouterNote] = field(default_factory=list)
    queue: asyncio.Queue[EngineUpdate] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] = field(init=False)

    def send(self, **changes: object) -> None:
        """Send the update with these fields changed."""
        self.update = msgspec.structs.replace(self.update, **changes)
        self.queue.put_nowait(self.update)


@asynccontextmanager
async def owner(port: int, update: EngineUpdate, token: str = "") -> AsyncIterator[Owner]:
    """Attach an engine until the block ends; then the stream ends too."""
    made = Owner(update)
    made.queue.put_nowait(update)

    async def updates() -> AsyncIterator[EngineUpdate]:
        while True:
            yield await made.queue.get()

    channel = connect(f"127.0.0.1:{port}")

    async def listen() -> None:
        async for note in converse(channel, ATTACH, updates(), token=token):
            made.notes.append(note)

    made.task = asyncio.create_task(listen())
    try:
        yield made
    finally:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)
        await channel.close()
