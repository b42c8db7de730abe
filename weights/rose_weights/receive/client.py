"""A receiver's side of the weight plane: follow a run, bring a bundle.

``WeightsClient.pull`` asks the store for one manifest from what the receiver holds to what it
wants, brings the blocks that are not in the folder yet (``Fetcher``) and writes the manifest last.
It can be called again after any failure: blocks that arrived stay. Next step: ``bundle`` keeps the
blocks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from rose_core.delta import BlockEntry, DeltaError, Manifest, faults
from rose_core.delta.codec import SELF_CONTAINED
from rose_core.identity import WeightVersion
from rose_weights.bundle import Bundle
from rose_weights.call_policy import ANSWER_SECONDS, ATTEMPTS, PLAN_SECONDS, understanding
from rose_weights.errors import Damaged, TooLarge, WeightsError
from rose_weights.messages import (
    AttestedReply,
    AttestedRequest,
    AwaitReply,
    AwaitRequest,
    DescribeRequest,
    Description,
    FetchPlan,
    FetchRequest,
    PlanReply,
    PlanRequest,
    VersionInfo,
    WatchRequest,
)
from rose_weights.methods import ATTESTED, AWAIT, DESCRIBE, FETCH, PLAN, WATCH
from rose_weights.pieces import Unpacker
from rose_wire import rpc
from rose_wire.errors import Unavailable

_ResultT = TypeVar("_ResultT")
_log = logging.getLogger(__name__)
BATCH_BYTES = 16 << 20
"""Blocks asked for in one call; what a break costs at most."""
CONNECTIONS = 4
"""For a fetch of as many calls or more."""


class WeightsClient:
    """Talks to a store or a relay.

    Args:
        address: ``host:port``, or ``tls://host:port`` (``rose_wire.tls``).
        token: bearer token.
        credentials: instead of those that the address asks for.
        holder: this receiver's name; versions it works with are kept for it.
        connections: for large fetches; one may not fill a long or lossy link.
        rest: called after every block with the seconds it took; a fetch waits for it.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        holder: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        connections: int = CONNECTIONS,
        rest: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self._channel = rpc.connect(address, credentials=credentials)
        another = functools.partial(rpc.connect, address, credentials=credentials, own=True)
        self._fetcher = Fetcher(
            self._channel, another, token=token, connections=connections, rest=rest
        )
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
        """End the connections."""
        await self._fetcher.close()

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

    async def watch(self, run: str) -> AsyncGenerator[VersionInfo, None]:
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
        codecs: Sequence[int] = SELF_CONTAINED,
    ) -> FetchPlan:
        """One manifest from what the receiver holds to what it wants (None = the head).

        Args:
            run: the run.
            have: version the receiver's label names.
            digest: digest of what it really holds.
            want: None = the head.
            codecs: block codecs the receiver can read.

        Raises:
            UnknownRun, UnknownVersion: nothing to plan.
            Damaged: the answer is no manifest.
            Unavailable: the store does not answer.
        """
        request = PlanRequest(run, have, digest, want, self._holder, tuple(map(int, codecs)))
        with understanding():
            reply: PlanReply = await rpc.call(
                self._channel, PLAN, request, timeout=PLAN_SECONDS, token=self._token
            )
        try:
            return FetchPlan(Manifest.decode(reply.manifest), reply.merged)
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
        codecs: Sequence[int] = SELF_CONTAINED,
        most_bytes: int = 0,
    ) -> Manifest:
        """Bring a bundle into a folder.

        Args:
            run: the run.
            folder: made when missing; blocks of an earlier attempt are used.
            have: version the receiver's label names.
            digest: digest of what it really holds; empty brings the full state.
            want: None = the head.
            codecs: block codecs the receiver can read.
            most_bytes: of blocks; 0 = no limit.

        Returns:
            The manifest; without blocks when the receiver is there already.

        Raises:
            TooLarge: it has more than ``most_bytes``.
            WeightsError: the store's reason, or blocks that stay damaged.
            Unavailable: the store went away; call again.
            OSError: the folder's disk is full or broken.
        """
        plan = await self.plan(run, have=have, digest=digest, want=want, codecs=codecs)
        manifest = plan.manifest
        if most_bytes and manifest.block_bytes > most_bytes:
            size, most = manifest.block_bytes / 2**30, most_bytes / 2**30
            raise TooLarge(
                f"{manifest.target} takes {size:.3g} GiB, and this node fetches {most:.3g} at most "
                "(weightSync.versionGibibytes of the chart)"
            )
        faults.at("sync.planned")
        bundle = Bundle(folder)
        await self.fetch(manifest, bundle)
        faults.at("sync.fetched")
        await asyncio.to_thread(bundle.finish, manifest)
        faults.at("sync.bundle")
        return manifest

    async def report_attested(self, version: WeightVersion, digest: str) -> bool:
        """Tell the store what this receiver serves.

        Returns:
            Whether the store knows such a version with that digest.

        Raises:
            UnknownRun: no such run.
            Unavailable: the store does not answer.
        """
        return (await self.compare(version, digest, ())).known

    async def compare(
        self,
        version: WeightVersion,
        digest: str,
        answer: Sequence[float],
        *,
        trainer: bool = False,
    ) -> AttestedReply:
        """The same, with the log-probs that were computed for the fixed prompt.

        Args:
            version: what is served.
            digest: of its whole state.
            answer: log-probs of ``rose_core.delta.probe.PROMPT``.
            trainer: they are the trainer's; needs the right to publish.

        Returns:
            What others computed.

        Raises:
            UnknownRun: no such run.
            Unavailable: the store does not answer.
        """
        request = AttestedRequest(self._holder, version, digest, tuple(answer), trainer)
        with understanding():
            reply: AttestedReply = await rpc.call(
                self._channel, ATTESTED, request, timeout=ANSWER_SECONDS, token=self._token
            )
        return reply

    async def wait_reached(
        self, version: WeightVersion, quorum: float, seconds: float
    ) -> AwaitReply:
        """Wait until enough receivers serve a version or a later one.

        Args:
            version: the version.
            quorum: an integer = that many; a fraction up to 1 = that share of those that report.
            seconds: for how long; the answer says whether it was met.

        Raises:
            Unavailable: the store does not answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            left = max(deadline - loop.time(), 0.0)
            request = AwaitRequest(version, quorum, min(left, ANSWER_SECONDS / 2))
            with understanding():
                reply: AwaitReply = await rpc.call(
                    self._channel, AWAIT, request, timeout=ANSWER_SECONDS, token=self._token
                )
            if reply.met or loop.time() >= deadline:
                return reply

    async def fetch(self, manifest: Manifest, bundle: Bundle) -> None:
        """Bring the manifest's blocks that the bundle lacks.

        Raises:
            Damaged: a block arrived damaged three times over every connection.
            Unavailable: the store went away three times without a block between.
        """
        await self._fetcher.fetch(manifest, bundle)


class Fetcher:
    """Fetches a manifest's blocks in calls of bounded size, over several connections.

    What a lost connection did not bring is fetched over the others. What had arrived stays in the
    bundle, so a call that is repeated asks for the rest.

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
            batch = _take(absent)
            before = len(batch)
            try:
                await self._fetch_batch(channel, batch, bundle, check)
            except (Unavailable, WeightsError) as error:
                failures = 1 if len(batch) < before else failures + 1
                check = check or isinstance(error, Damaged)
                absent.extendleft(reversed(batch))
                if failures >= ATTEMPTS:
                    return error
                _log.warning("fetch of %s broke, asking again: %s", manifest.target, error)
                await asyncio.sleep(0.2 * failures)
        return None

    async def _fetch_batch(
        self, channel: grpc.aio.Channel, batch: deque[BlockEntry], bundle: Bundle, check: bool
    ) -> None:
        """Bring these blocks; those that arrived are taken off."""
        request = FetchRequest(tuple(block.sha256 for block in batch), check)
        unpacker = Unpacker([block.size for block in batch])
        writing: asyncio.Task[None] | None = None

        async def write(blocks: Sequence[memoryview]) -> None:
            for data in blocks:
                began = time.monotonic()
                await asyncio.to_thread(bundle.put, batch[0].sha256, data)
                faults.at("sync.block")
                batch.popleft()
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
