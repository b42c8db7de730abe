"""One per serving cluster: each block crosses the boundary once, whoever asks for it.

A relay answers what receivers ask (describe, watch, plan, fetch) from the store behind it and keeps
blocks on its own disk. Blocks are named by their content, so nothing it keeps can be out of date.
Of several receivers that want the same block or the same plan at the same time one asks the store,
the others wait for it. Publishing is not offered here.

| block | next | when |
|---|---|---|
| absent | coming | the first receiver asks; the relay asks the store |
| coming | kept | it arrived and its hash is right; everybody waiting reads it from disk |
| coming | absent | the store went away; everybody waiting gets the reason and asks again |
| kept | absent | longest unused, when more than ``keep_bytes`` are kept, or damaged on disk |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from rose_core.delta import DeltaError, Manifest
from rose_weights import metrics
from rose_weights.blocks import Blocks
from rose_weights.client import ANSWER_SECONDS, ATTEMPTS, PLAN_SECONDS, understanding
from rose_weights.errors import Damaged, Incomplete, StoreFailed
from rose_weights.messages import (
    DescribeRequest,
    Description,
    FetchRequest,
    PlanReply,
    PlanRequest,
    VersionInfo,
    WatchRequest,
)
from rose_weights.service import (
    DESCRIBE,
    FETCH,
    PIECE_BYTES,
    PLAN,
    WATCH,
    answering,
    refusing,
)
from rose_wire import rpc
from rose_wire.rpc import Server

BATCH_BLOCKS = 64
"""Blocks asked for in one call to the store."""

KEEP_BYTES = 64 << 30

MOST_SIZES = 2_000_000
"""Sizes of blocks remembered from plans; a block without one is asked for alone."""


class Relay:
    """Handlers over a store elsewhere and a folder of blocks here.

    Args:
        channel: connection to the store (or to another relay).
        blocks: the folder.
        token: the store's bearer token.
        keep_bytes: what the folder may hold before the longest unused blocks go.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        blocks: Blocks,
        *,
        token: str = "",
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        self._channel = channel
        self._blocks = blocks
        self._token = token
        self._keep = keep_bytes
        self._sizes: dict[bytes, int] = {}
        self._coming: dict[bytes, asyncio.Future[None]] = {}
        self._plans: dict[tuple[object, ...], asyncio.Task[PlanReply]] = {}

    def bind(self, server: Server) -> None:
        """Offer the receivers' methods on a server."""
        server.unary(DESCRIBE, answering(self.describe))
        server.unary(PLAN, answering(self.plan))
        server.server_stream(WATCH, self.watch)
        server.server_stream(FETCH, self.fetch)

    async def describe(self, request: DescribeRequest) -> Description:
        """What the store says."""
        with understanding():
            return await rpc.call(
                self._channel, DESCRIBE, request, timeout=ANSWER_SECONDS, token=self._token
            )

    async def watch(self, request: WatchRequest) -> AsyncIterator[VersionInfo]:
        """What the store says; ends when the store's stream ends."""
        async for head in rpc.receive(self._channel, WATCH, request, token=self._token):
            yield head

    async def plan(self, request: PlanRequest) -> PlanReply:
        """What the store says; receivers that ask the same at the same time share one answer."""
        key = (request.run, request.have, request.digest, request.want)
        task = self._plans.get(key)
        if task is None:
            task = asyncio.create_task(self._plan(request))
            self._plans[key] = task
            task.add_done_callback(lambda done: self._planned(key, done))
        return await asyncio.shield(task)

    async def fetch(self, request: FetchRequest) -> AsyncIterator[bytes]:
        """Blocks one after the other; those that are not here come from the store first."""
        for start in range(0, len(request.names), BATCH_BLOCKS):
            names = request.names[start : start + BATCH_BLOCKS]
            waiting = bytearray()
            with refusing():
                await self._bring(names)
            for name in names:
                with refusing():
                    waiting += await self._block(name, names)
                if len(waiting) >= PIECE_BYTES:
                    metrics.SENT_BYTES.inc(len(waiting))
                    yield bytes(waiting)
                    waiting.clear()
            if waiting:
                metrics.SENT_BYTES.inc(len(waiting))
                yield bytes(waiting)
        await asyncio.to_thread(self._blocks.trim, self._keep)

    def _planned(self, key: tuple[object, ...], task: asyncio.Task[PlanReply]) -> None:
        self._plans.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen, also when every receiver has gone meanwhile

    async def _plan(self, request: PlanRequest) -> PlanReply:
        with understanding():
            reply = await rpc.call(
                self._channel, PLAN, request, timeout=PLAN_SECONDS, token=self._token
            )
        try:
            manifest = Manifest.decode(reply.manifest)
        except DeltaError as error:
            message = f"the store's plan for {request.run} cannot be read: {error}"
            raise Damaged(message) from error
        if len(self._sizes) > MOST_SIZES:
            self._sizes.clear()
        self._sizes.update({block.sha256: block.size for block in manifest.blocks})
        return reply

    async def _block(self, name: bytes, batch: Sequence[bytes]) -> bytes:
        """A block's bytes, brought together with what is missing of its batch."""
        for _ in range(ATTEMPTS):  # it was damaged on disk, or whoever fetched it failed
            try:
                return await asyncio.to_thread(self._blocks.get, name)
            except (Incomplete, Damaged):
                await self._bring(batch)
        return await asyncio.to_thread(self._blocks.get, name)

    async def _bring(self, names: Sequence[bytes]) -> None:
        absent = await asyncio.to_thread(self._blocks.missing, names)
        mine = [name for name in dict.fromkeys(absent) if name not in self._coming]
        others = [self._coming[name] for name in absent if name in self._coming]
        loop = asyncio.get_running_loop()
        for name in mine:
            self._coming[name] = loop.create_future()
        try:
            if mine:
                await self._fetch(mine)
        finally:
            # Whoever waits looks at the disk again and, where the block is not there, asks itself.
            for name in mine:
                self._coming.pop(name).set_result(None)
        for future in others:
            await future

    async def _fetch(self, names: Sequence[bytes]) -> None:
        known = [name for name in names if name in self._sizes]
        # Without a size nobody knows where a block ends, so those come one by one.
        for batch in ([known] if known else []) + [[n] for n in names if n not in self._sizes]:
            with understanding():
                await self._fetch_batch(batch)

    async def _fetch_batch(self, names: Sequence[bytes]) -> None:
        waiting = bytearray()
        left = list(names)
        request = FetchRequest(tuple(names))
        async for piece in rpc.receive(self._channel, FETCH, request, token=self._token):
            metrics.RECEIVED_BYTES.inc(len(piece))
            waiting += piece
            while left and 0 < self._sizes.get(left[0], 0) <= len(waiting):
                size = self._sizes[left[0]]
                await self._keep_block(left.pop(0), bytes(waiting[:size]))
                del waiting[:size]
        if len(left) == 1 and left[0] not in self._sizes:
            await self._keep_block(left.pop(), bytes(waiting))
        if left:
            message = f"the store ended a fetch with {len(left)} blocks to come"
            raise Damaged(message)

    async def _keep_block(self, name: bytes, data: bytes) -> None:
        try:
            found = await asyncio.to_thread(self._blocks.put, data)
        except OSError as error:
            message = f"cannot keep a block: {error.strerror or error}"
            raise StoreFailed(message) from error
        if found != name:
            message = f"block {name.hex()[:16]} arrived damaged at the relay"
            raise Damaged(message)
