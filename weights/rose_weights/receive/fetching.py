"""How a manifest's blocks come: in calls of bounded size, over several connections, resumable.

What a lost connection had not brought the others bring; what had arrived stays in the bundle, so
asking again asks for the rest. Next step: ``bundle`` keeps the blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TypeVar

import grpc.aio

from rose_core.delta import BlockEntry, Manifest, faults
from rose_weights.bundle import Bundle
from rose_weights.call_policy import ATTEMPTS, understanding
from rose_weights.errors import Damaged, WeightsError
from rose_weights.messages import FetchRequest
from rose_weights.methods import FETCH
from rose_weights.pieces import Unpacker
from rose_wire import rpc
from rose_wire.errors import Unavailable

_ResultT = TypeVar("_ResultT")

LOG = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""Blocks asked for in one call; what a break costs at most."""

CONNECTIONS = 4
"""For a fetch of as many calls or more."""


class Fetcher:
    """Brings blocks.

    Args:
        channel: the connection that small fetches use.
        connect: makes another one.
        token: bearer token.
        connections: for large fetches; one may not fill a long or lossy link.
        rest: called after every block with the seconds it took; a fetch waits for it.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        connect: Callable[[], grpc.aio.Channel],
        *,
        token: str,
        connections: int,
        rest: Callable[[float], Awaitable[None]] | None,
    ) -> None:
        self._channels = [channel]
        self._connect = connect
        self._token = token
        self._connections = connections
        self._rest = rest

    async def close(self) -> None:
        """End the connections."""
        for channel in self._channels:
            await channel.close()

    async def fetch(self, manifest: Manifest, bundle: Bundle) -> None:
        """Bring the manifest's blocks that the bundle lacks.

        Over several connections where there is more than one call's worth.

        Raises:
            Damaged: a block arrived damaged three times over every connection.
            Unavailable: the store went away three times without a block between.
        """
        absent = deque(await asyncio.to_thread(bundle.absent, manifest))
        calls = -(-sum(block.size for block in absent) // BATCH_BYTES)
        lanes = self._lanes(calls) if absent else []
        while absent:
            errors = await _together(self._bring(lane, absent, manifest, bundle) for lane in lanes)
            lanes = [lane for lane, error in zip(lanes, errors, strict=True) if error is None]
            if not lanes:
                raise next(error for error in errors if error is not None)

    def _lanes(self, calls: int) -> list[grpc.aio.Channel]:
        while len(self._channels) < min(calls, self._connections):
            self._channels.append(self._connect())
        return self._channels[: max(calls, 1)]

    async def _bring(
        self,
        channel: grpc.aio.Channel,
        absent: deque[BlockEntry],
        manifest: Manifest,
        bundle: Bundle,
    ) -> Exception | None:
        """Bring blocks of ``absent`` over one connection until none is left; or why it gave up."""
        failures, check = 0, False
        while absent:
            mine = _take(absent)
            before = len(mine)
            try:
                await self._fetch_batch(channel, mine, bundle, check)
            except (Unavailable, WeightsError) as error:
                failures = 1 if len(mine) < before else failures + 1
                check = check or isinstance(error, Damaged)
                absent.extendleft(reversed(mine))
                if failures >= ATTEMPTS:
                    return error
                LOG.warning("fetch of %s broke, asking again: %s", manifest.target, error)
                await asyncio.sleep(0.2 * failures)
        return None

    async def _fetch_batch(
        self, channel: grpc.aio.Channel, mine: deque[BlockEntry], bundle: Bundle, check: bool
    ) -> None:
        """Bring these blocks; those that arrived are taken off."""
        request = FetchRequest(tuple(block.sha256 for block in mine), check)
        unpacker = Unpacker([block.size for block in mine])
        writing: asyncio.Task[None] | None = None

        async def write(blocks: Sequence[memoryview]) -> None:
            for data in blocks:
                began = time.monotonic()
                await asyncio.to_thread(bundle.put, mine[0].sha256, data)
                faults.at("sync.block")
                mine.popleft()
                if self._rest is not None:
                    await self._rest(time.monotonic() - began)

        try:
            with understanding():
                async for piece in rpc.receive(channel, FETCH, request, token=self._token):
                    ready = unpacker.feed(piece)
                    if writing is not None:  # what came before is written while this one came
                        await writing
                    writing = asyncio.create_task(write(ready))
        finally:
            if writing is not None:
                await writing
        if unpacker.left:
            message = f"the store ended a fetch {unpacker.begun_bytes} bytes into a block"
            raise Damaged(message)


async def _together(works: Iterable[Coroutine[None, None, _ResultT]]) -> list[_ResultT]:
    """All results; when one raises, the others are ended first."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _take(blocks: deque[BlockEntry]) -> deque[BlockEntry]:
    """Take the first blocks, up to about ``BATCH_BYTES``."""
    batch: deque[BlockEntry] = deque()
    size = 0
    while blocks and size < BATCH_BYTES:
        batch.append(blocks.popleft())
        size += batch[-1].size
    return batch
