"""A receiver's side of the weight plane: follow a run, bring a bundle.

``WeightsClient.pull`` asks the store for one manifest from what the receiver holds to what it
wants, brings the blocks that are not in the folder yet and writes the manifest last. It can be
called again after any failure: blocks that arrived stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rose_core.delta import BlockEntry, DeltaError, Manifest
from rose_core.identity import WeightVersion
from rose_weights.bundle import Bundle
from rose_weights.errors import Damaged, WeightsError, from_text
from rose_weights.messages import (
    DescribeRequest,
    Description,
    FetchRequest,
    PlanReply,
    PlanRequest,
    VersionInfo,
    WatchRequest,
)
from rose_weights.service import DESCRIBE, FETCH, PLAN, WATCH
from rose_wire import rpc
from rose_wire.errors import Refused, Unavailable

LOG = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
PLAN_SECONDS = 600.0
"""A merge over many versions or a full state takes the store this long at most."""

BATCH_BYTES = 16 << 20
"""Blocks asked for in one call; what a break costs at most."""

ATTEMPTS = 3


@contextlib.contextmanager
def understanding() -> Iterator[None]:
    """Refusals of the store as the errors it raised."""
    try:
        yield
    except Refused as error:
        known = from_text(str(error))
        if known is None:
            raise
        raise known from error


class WeightsClient:
    """Talks to a store or a relay.

    Args:
        address: ``host:port``.
        token: bearer token.
        holder: this receiver's name; versions it works with are kept for it.
    """

    def __init__(self, address: str, *, token: str = "", holder: str = "") -> None:
        self._channel = rpc.connect(address)
        self._token = token
        self._holder = holder

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close()

    async def describe(self, run: str = "") -> Description:
        """Runs, or one run's kept versions.

        Raises:
            UnknownRun: no such run.
            Unavailable: the store does not answer.
        """
        with understanding():
            return await rpc.call(
                self._channel,
                DESCRIBE,
                DescribeRequest(run),
                timeout=ANSWER_SECONDS,
                token=self._token,
            )

    async def watch(self, run: str) -> AsyncIterator[VersionInfo]:
        """The head now, when there is one, and after every publish.

        Raises:
            Unavailable: the stream broke; watch again.
        """
        with understanding():
            async for head in rpc.receive(
                self._channel, WATCH, WatchRequest(run), token=self._token
            ):
                yield head

    async def plan(
        self,
        run: str,
        *,
        have: WeightVersion | None = None,
        digest: str = "",
        want: WeightVersion | None = None,
    ) -> tuple[Manifest, int]:
        """One manifest from what the receiver holds to what it wants (None = the head).

        Returns:
            The manifest, and how many published ones went into it (0 = it is there already).

        Raises:
            UnknownRun, UnknownVersion: nothing to plan.
            Damaged: the answer is no manifest.
            Unavailable: the store does not answer.
        """
        request = PlanRequest(run, have, digest, want, self._holder)
        with understanding():
            reply: PlanReply = await rpc.call(
                self._channel, PLAN, request, timeout=PLAN_SECONDS, token=self._token
            )
        try:
            return Manifest.decode(reply.manifest), reply.merged
        except DeltaError as error:
            message = f"the store's plan for {run} cannot be read: {error}"
            raise Damaged(message) from error

    async def pull(
        self,
        run: str,
        folder: Path,
        *,
        have: WeightVersion | None = None,
        digest: str = "",
        want: WeightVersion | None = None,
    ) -> Manifest:
        """Bring a bundle into a folder.

        Args:
            run: the run.
            folder: made when missing; blocks of an earlier attempt are used.
            have: version the receiver's label names.
            digest: digest of what it really holds; empty brings the full state.
            want: None = the head.

        Returns:
            The manifest; without blocks when the receiver is there already.

        Raises:
            WeightsError: the store's reason, or blocks that stay damaged.
            Unavailable: the store went away; call again.
            OSError: the folder's disk is full or broken.
        """
        manifest, _ = await self.plan(run, have=have, digest=digest, want=want)
        bundle = Bundle(folder)
        await self.fetch(manifest, bundle)
        await asyncio.to_thread(bundle.finish, manifest)
        return manifest

    async def fetch(self, manifest: Manifest, bundle: Bundle) -> None:
        """Bring the manifest's blocks that the bundle lacks.

        Raises:
            Damaged: a block arrived damaged three times.
            Unavailable: the store went away three times without a block between.
        """
        absent = deque(await asyncio.to_thread(bundle.absent, manifest))
        failures = 0
        while absent:
            before = len(absent)
            try:
                await self._fetch_batch(_batch(absent), absent, bundle)
            except (Unavailable, WeightsError) as error:
                failures = 1 if len(absent) < before else failures + 1
                if failures >= ATTEMPTS:
                    raise
                LOG.warning("fetch of %s broke, asking again: %s", manifest.target, error)
                await asyncio.sleep(0.2 * failures)

    async def _fetch_batch(
        self, batch: Sequence[BlockEntry], absent: deque[BlockEntry], bundle: Bundle
    ) -> None:
        """Bring the first blocks of ``absent``; those that arrived are taken off it."""
        waiting = bytearray()
        request = FetchRequest(tuple(block.sha256 for block in batch))
        left = len(batch)
        with understanding():
            async for piece in rpc.receive(self._channel, FETCH, request, token=self._token):
                waiting += piece
                ready: list[tuple[bytes, bytes]] = []
                size = 0
                while left > len(ready) and len(waiting) - size >= absent[len(ready)].size:
                    block = absent[len(ready)]
                    ready.append((block.sha256, bytes(waiting[size : size + block.size])))
                    size += block.size
                del waiting[:size]
                for name, data in ready:
                    await asyncio.to_thread(bundle.put, name, data)
                    absent.popleft()
                    left -= 1
        if left:
            message = f"the store ended a fetch {len(waiting)} bytes into a block"
            raise Damaged(message)


def _batch(blocks: Iterable[BlockEntry]) -> list[BlockEntry]:
    """The first blocks, up to about ``BATCH_BYTES``."""
    batch: list[BlockEntry] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += block.size
        if size >= BATCH_BYTES:
            break
    return batch
