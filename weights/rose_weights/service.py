"""The store over gRPC: describe, watch, plan, fetch for receivers; open, put, commit for trainers.

| method | who | what |
|---|---|---|
| ``DESCRIBE`` | anyone | runs, or the kept versions of one run |
| ``WATCH`` | receivers | the head now and after every publish |
| ``PLAN`` | receivers | one manifest from what they hold to what they want |
| ``FETCH`` | receivers | blocks as raw bytes; ask again for those that did not arrive |
| ``OPEN`` | publisher | a new incarnation; fences the publisher before |
| ``MISSING``, ``PUT`` | publisher | stage blocks; one raw block per message |
| ``COMMIT`` | publisher | the manifest becomes the head, by compare-and-swap |

Errors travel as a word and a text (``errors.as_text``). Files and merges run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from rose_core.delta import DeltaError, Manifest
from rose_weights import metrics, retention
from rose_weights.errors import BadManifest, UnknownRun, WeightsError, as_text
from rose_weights.leases import Leases
from rose_weights.messages import (
    CommitRequest,
    DescribeRequest,
    Description,
    FetchRequest,
    MissingReply,
    MissingRequest,
    OpenRequest,
    PlanReply,
    PlanRequest,
    PutReply,
    VersionInfo,
    WatchRequest,
)
from rose_weights.planning import Planner
from rose_weights.state import Kept, RunState
from rose_weights.store import Store
from rose_wire.errors import Refused
from rose_wire.rpc import Method, Server

SERVICE = "rose.v1.Weights"

DESCRIBE = Method(SERVICE, "Describe", DescribeRequest, Description)
WATCH = Method(SERVICE, "Watch", WatchRequest, VersionInfo)
PLAN = Method(SERVICE, "Plan", PlanRequest, PlanReply)
FETCH = Method(SERVICE, "Fetch", FetchRequest, bytes)
OPEN = Method(SERVICE, "Open", OpenRequest, Description)
MISSING = Method(SERVICE, "Missing", MissingRequest, MissingReply)
PUT = Method(SERVICE, "Put", bytes, PutReply)
COMMIT = Method(SERVICE, "Commit", CommitRequest, VersionInfo)

PIECE_BYTES = 1 << 20
"""Raw bytes per message: the best of the sizes tried on loopback."""

LOG = logging.getLogger(__name__)

_RequestT = TypeVar("_RequestT")
_ReplyT = TypeVar("_ReplyT")


class WeightService:
    """Handlers over one store.

    Args:
        store: where versions are.
        window: versions kept behind the head.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        window: int = retention.WINDOW,
        grace_seconds: float = retention.GRACE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._planner = Planner(store)
        self._window = window
        self._grace = grace_seconds
        self._leases = Leases(clock)
        self._moved = asyncio.Event()
        self._tidying: asyncio.Task[None] | None = None

    def bind(self, server: Server) -> None:
        """Offer every method on a server."""
        server.unary(DESCRIBE, answering(self.describe))
        server.unary(PLAN, answering(self.plan))
        server.unary(OPEN, answering(self.open))
        server.unary(MISSING, answering(self.missing))
        server.unary(COMMIT, answering(self.commit))
        server.server_stream(WATCH, self.watch)
        server.server_stream(FETCH, self.fetch)
        server.bidirectional(PUT, self.put)

    async def describe(self, request: DescribeRequest) -> Description:
        """Runs, or one run."""
        if not request.run:
            return Description(runs=tuple(await asyncio.to_thread(self._store.runs)))
        return _description(await asyncio.to_thread(self._store.state, request.run))

    async def watch(self, request: WatchRequest) -> AsyncIterator[VersionInfo]:
        """The head now, when there is one, and after every publish; ends with the stream."""
        shown: VersionInfo | None = None
        while True:
            moved = self._moved  # taken before reading, so that no publish is missed
            with refusing():
                head = await self._head(request.run)
            if head is not None and head != shown:
                yield head
                shown = head
            await moved.wait()

    async def plan(self, request: PlanRequest) -> PlanReply:
        """One manifest from what the receiver holds to what it wants."""
        began = time.monotonic()
        manifest, merged = await asyncio.to_thread(
            self._planner.plan, request.run, request.have, request.digest, request.want
        )
        if request.holder:
            self._leases.take(request.holder, request.run, (manifest.base, manifest.target))
        metrics.PLANS.labels(request.run, _kind(manifest, merged)).inc()
        metrics.PLAN_SECONDS.observe(time.monotonic() - began)
        return PlanReply(manifest.encode(), merged)

    async def fetch(self, request: FetchRequest) -> AsyncIterator[bytes]:
        """Blocks one after the other, packed into pieces of about ``PIECE_BYTES``."""
        waiting = bytearray()
        for name in request.names:
            with refusing():
                waiting += await asyncio.to_thread(self._store.blocks.get, name)
            while len(waiting) >= PIECE_BYTES:
                metrics.SENT_BYTES.inc(PIECE_BYTES)
                yield bytes(waiting[:PIECE_BYTES])
                del waiting[:PIECE_BYTES]
        if waiting:
            metrics.SENT_BYTES.inc(len(waiting))
            yield bytes(waiting)

    async def open(self, request: OpenRequest) -> Description:
        """A new incarnation for this publisher."""
        state = await asyncio.to_thread(
            self._store.open_incarnation, request.run, request.publisher
        )
        LOG.info("run %s: incarnation %d for %s", state.run, state.fence, state.publisher)
        return _description(state)

    async def missing(self, request: MissingRequest) -> MissingReply:
        """Blocks the publisher has to send."""
        found = await asyncio.to_thread(self._store.blocks.missing, request.names)
        return MissingReply(tuple(found))

    async def put(self, blocks: AsyncIterator[bytes]) -> AsyncIterator[PutReply]:
        """Stage blocks; one answer each."""
        async for block in blocks:
            try:
                name = await asyncio.to_thread(self._store.put_block, block)
            except WeightsError as error:
                metrics.REFUSALS.labels(error.word).inc()
                yield PutReply(error=as_text(error))
                continue
            metrics.RECEIVED_BYTES.inc(len(block))
            yield PutReply(name)

    async def commit(self, request: CommitRequest) -> VersionInfo:
        """Move the head."""
        run = _run_of(request.manifest)
        try:
            state = await asyncio.to_thread(self._store.commit, request.manifest, request.expected)
        except WeightsError as error:
            metrics.COMMITS.labels(run, error.word).inc()
            raise
        kept = state.versions[-1]
        _measure(state, kept)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.create_task(self._tidy(run))
        return _info(kept)

    async def close(self) -> None:
        """Wait for work in the background."""
        if self._tidying is not None:
            await self._tidying

    async def _tidy(self, run: str) -> None:
        try:
            folded = await asyncio.to_thread(
                retention.fold, self._store, run, window=self._window, leased=self._leases.held(run)
            )
            if not folded:
                return
            spare = await asyncio.to_thread(self._planner.cached_blocks)
            freed = await asyncio.to_thread(
                retention.sweep, self._store, spare=spare, grace_seconds=self._grace
            )
        except (WeightsError, DeltaError):
            LOG.exception("run %s: old versions were not folded; they stay", run)
            return
        metrics.FREED_BYTES.inc(freed)
        LOG.info("run %s: %d versions folded, %d bytes freed", run, folded, freed)

    async def _head(self, run: str) -> VersionInfo | None:
        try:
            state = await asyncio.to_thread(self._store.state, run)
        except UnknownRun:
            return None
        kept = state.kept(state.head)
        return None if kept is None else _info(kept)


def _kind(manifest: Manifest, merged: int) -> str:
    if manifest.base is None:
        return "Full"
    return ("Same", "Delta", "Merged")[min(merged, 2)]


def _info(kept: Kept) -> VersionInfo:
    return VersionInfo(kept.version, kept.digest, kept.base, kept.step, kept.changes, kept.bytes)


def _description(state: RunState) -> Description:
    head = state.kept(state.head)
    return Description(
        run=state.run,
        head=None if head is None else _info(head),
        versions=tuple(_info(kept) for kept in state.versions),
        fence=state.fence,
        publisher=state.publisher,
    )


def _measure(state: RunState, kept: Kept) -> None:
    metrics.COMMITS.labels(state.run, "Published").inc()
    metrics.HEAD_INCARNATION.labels(state.run).set(kept.version.incarnation)
    metrics.HEAD_SEQUENCE.labels(state.run).set(kept.version.sequence)
    metrics.DELTA_BYTES.labels(state.run).inc(kept.bytes)
    metrics.CHANGED_RATIO.labels(state.run).set(kept.changes / max(kept.elements, 1))


def _run_of(manifest: bytes) -> str:
    try:
        return Manifest.decode(manifest).target.run
    except DeltaError as error:
        raise BadManifest(str(error)) from error


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Errors of the store as refusals that the other side can read."""
    try:
        yield
    except (WeightsError, DeltaError) as error:
        metrics.REFUSALS.labels(type(error).__name__).inc()
        text = as_text(error) if isinstance(error, WeightsError) else str(error)
        raise Refused(text) from error


def answering(
    handler: Callable[[_RequestT], Awaitable[_ReplyT]],
) -> Callable[[_RequestT], Awaitable[_ReplyT]]:
    """A handler whose errors are refusals."""

    @functools.wraps(handler)
    async def answer(request: _RequestT) -> _ReplyT:
        with refusing():
            return await handler(request)

    return answer
