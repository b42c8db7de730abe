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
| ``PART`` | ranks of a sharded publisher | the same, once the parts of all ranks are here |
| ``ATTESTED`` | receivers | what they serve, recomputed on their live weights |
| ``AWAIT`` | publisher | enough receivers serve a version |

Errors travel as a word and a text (``errors.as_text``). Files and merges run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from rose_core.delta import faults, quorum
from rose_core.delta.probe import PROMPT, Answer
from rose_core.identity import WeightVersion
from rose_weights import metrics
from rose_weights.errors import Forbidden, UnknownRun, WeightsError, as_text
from rose_weights.messages import (
    AttestedReply,
    AttestedRequest,
    AwaitReply,
    AwaitRequest,
    CommitRequest,
    DescribeRequest,
    Description,
    FetchRequest,
    MissingReply,
    MissingRequest,
    OpenRequest,
    PartReply,
    PartRequest,
    PlanReply,
    PlanRequest,
    PutReply,
    VersionInfo,
    WatchRequest,
)
from rose_weights.methods import (
    ATTESTED,
    AWAIT,
    COMMIT,
    DESCRIBE,
    FETCH,
    MISSING,
    OPEN,
    PART,
    PLAN,
    PUT,
    WATCH,
)
from rose_weights.pieces import pack, together
from rose_weights.serve.access import OPEN as EVERYTHING
from rose_weights.serve.access import Right, StoreAccess
from rose_weights.serve.janitor import Janitor, Leases
from rose_weights.serve.responses import (
    answering,
    description,
    info,
    measure,
    plan_kind,
    refusing,
    run_of,
)
from rose_weights.store import retention
from rose_weights.store.planning import FetchPlanner
from rose_weights.store.record_store import is_place
from rose_weights.store.sharded_parts import IncompleteVersions, run_of_part
from rose_weights.store.state import RunState
from rose_weights.store.store import Store
from rose_wire.rpc import Server, peer

REPORT_SECONDS = 180.0
"""Three reports of a receiver may be lost before it no longer counts."""

ANSWERED_VERSIONS = 64
"""Versions whose answers to the fixed prompt are remembered."""

LONGEST_SECONDS = 30.0
"""A caller that waits longer asks again."""

STAGED_AHEAD = 16
"""Blocks of a publisher that are written at the same time."""

LOG = logging.getLogger(__name__)


@dataclass
class _PromptAnswers:
    """Answers to the fixed prompt at one version; who may only read is never the trainer."""

    trainer: Answer = ()
    engines: dict[str, Answer] = field(default_factory=dict)


class Attestations:
    """Which receivers serve which version, by their own word: what ``wait(quorum=...)`` asks.

    With it comes what they computed for the fixed prompt, to be compared
    (``rose_core.delta.probe``). Held in memory: receivers say it again every minute, so after a
    restart of the store the picture is complete soon. Who has not said anything for
    ``REPORT_SECONDS`` is gone.

    Args:
        store: what digests attestations are compared with.
        clock: monotonic seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._held: dict[tuple[str, str], tuple[float, WeightVersion]] = {}
        self._answers: dict[WeightVersion, _PromptAnswers] = {}
        self._moved = asyncio.Event()

    async def record(self, request: AttestedRequest) -> AttestedReply:
        """Note what a receiver serves, if it is what was published."""
        state = await asyncio.to_thread(self._store.state, request.version.run)
        kept = state.kept(request.version)
        if kept is None or kept.digest != request.digest:
            return AttestedReply(known=False)
        reply = self._answered(request)
        if request.trainer:
            return reply
        self._held[request.version.run, request.holder] = (self._clock(), request.version)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        return reply

    def _answered(self, request: AttestedRequest) -> AttestedReply:
        """Remember an answer to the fixed prompt; say what others answered."""
        answers = self._answers.get(request.version, _PromptAnswers())
        if request.answer:
            answers = self._answers.setdefault(request.version, answers)
            self._remember(answers, request)
        others = (answer for by, answer in answers.engines.items() if by != request.holder)
        return AttestedReply(True, answers.trainer, tuple(others))

    def _remember(self, answers: _PromptAnswers, request: AttestedRequest) -> None:
        answer = request.answer[: len(PROMPT)]
        if request.trainer:
            answers.trainer = answer
        else:
            answers.engines[request.holder] = answer
        while len(self._answers) > ANSWERED_VERSIONS:
            del self._answers[next(iter(self._answers))]

    async def wait_reached(self, request: AwaitRequest) -> AwaitReply:
        """Answer when the quorum is met, or when time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.seconds, LONGEST_SECONDS)
        while True:
            moved = self._moved
            found = quorum.reach(request.version, self._of(request.version.run))
            met = found.meets(request.quorum)
            left = deadline - loop.time()
            if met or left <= 0:
                return AwaitReply(met, found.serving, found.behind)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await moved.wait()

    def _of(self, run: str) -> dict[str, WeightVersion]:
        oldest = self._clock() - REPORT_SECONDS
        self._held = {key: value for key, value in self._held.items() if value[0] > oldest}
        return {holder: version for (of, holder), (_, version) in self._held.items() if of == run}


class WeightService:
    """Handlers over one store.

    Args:
        store: where versions are.
        window: versions kept behind the head.
        grace_seconds: blocks younger than this are never swept.
        access: who may do what; by default everybody everything, as nobody else gets in.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        window: int = retention.WINDOW,
        grace_seconds: float = retention.GRACE_SECONDS,
        access: StoreAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._planner = FetchPlanner(store)
        self._parts = IncompleteVersions(store)
        self._following = Attestations(store, clock)
        self._access = access or StoreAccess(EVERYTHING)
        self._leases = Leases(clock)
        self._moved = asyncio.Event()
        self._tidying = Janitor(store, self._planner, self._leases, window, grace_seconds)

    def bind(self, server: Server) -> None:
        """Offer every method on a server."""
        server.unary(DESCRIBE, answering(self.describe))
        server.unary(PLAN, answering(self.plan))
        server.unary(OPEN, answering(self.open))
        server.unary(MISSING, answering(self.missing))
        server.unary(COMMIT, answering(self.commit))
        server.unary(PART, answering(self.part))
        server.unary(ATTESTED, answering(self.record_attestation))
        server.unary(AWAIT, answering(self.wait_reached))
        server.server_stream(WATCH, self.watch)
        server.server_stream(FETCH, self.fetch)
        server.bidirectional(PUT, self.put)

    async def describe(self, request: DescribeRequest) -> Description:
        """Runs, or one run."""
        self._may("read", request.run or None)
        if not request.run:
            names, runs = peer(), await asyncio.to_thread(self._store.runs)
            return Description(
                runs=tuple(
                    run
                    for run in runs
                    if not is_place(run) and self._access.allows(names, "read", run)
                )
            )
        return description(await asyncio.to_thread(self._store.state, request.run))

    async def watch(self, request: WatchRequest) -> AsyncIterator[VersionInfo]:
        """The head now, when there is one, and after every publish; ends with the stream."""
        shown: VersionInfo | None = None
        with refusing():
            self._may("read", request.run)
        while True:
            moved = self._moved  # taken before reading, so that no publish is missed
            with refusing():
                self._may("read", request.run)  # again: a credential may have been revoked since
                head = await self._head(request.run)
            if head is not None and head != shown:
                yield head
                shown = head
            await moved.wait()

    async def plan(self, request: PlanRequest) -> PlanReply:
        """One manifest from what the receiver holds to what it wants."""
        self._may("read", request.run)
        began = time.monotonic()
        manifest, merged = await asyncio.to_thread(
            self._planner.plan,
            request.run,
            request.have,
            request.digest,
            request.want,
            request.codecs,
        )
        if request.holder:
            self._leases.take(request.holder, request.run, (manifest.base, manifest.target))
        metrics.PLANS.labels(request.run, plan_kind(manifest, merged)).inc()
        metrics.PLAN_SECONDS.observe(time.monotonic() - began)
        faults.at("store.plan")
        return PlanReply(manifest.encode(), merged)

    async def fetch(self, request: FetchRequest) -> AsyncIterator[bytes]:
        """Blocks one after the other, in pieces."""
        with refusing():
            self._may("read", None)
        # While some blocks are on the wire the next ones are read.
        waiting = deque(request.names)
        sent_bytes = sent_blocks = 0
        coming: asyncio.Task[list[bytes]] | None = None
        try:
            while waiting or coming is not None:
                with refusing():
                    blocks = await coming if coming is not None else []
                sent_bytes, sent_blocks = (
                    sent_bytes + sum(map(len, blocks)),
                    sent_blocks + len(blocks),
                )
                count = min(together(sent_bytes, sent_blocks), len(waiting))
                names = [waiting.popleft() for _ in range(count)]
                coming = asyncio.create_task(self._read(names, request.check)) if names else None
                for piece in pack(blocks):
                    metrics.SENT_BYTES.inc(len(piece))
                    faults.at("store.piece")
                    yield piece
        finally:
            if coming is not None:  # the receiver hung up
                coming.cancel()

    async def _read(self, names: Sequence[bytes], check: bool) -> list[bytes]:
        return await asyncio.to_thread(self._store.blocks.read, names, check=check)

    async def open(self, request: OpenRequest) -> Description:
        """A new incarnation for this publisher."""
        self._may("publish", request.run)
        state = await asyncio.to_thread(
            self._store.open_incarnation, request.run, request.publisher
        )
        LOG.info("run %s: incarnation %d for %s", state.run, state.fence, state.publisher)
        return description(state)

    async def missing(self, request: MissingRequest) -> MissingReply:
        """Blocks the publisher has to send."""
        self._may("publish", None)
        found = await asyncio.to_thread(self._store.blocks.missing, request.names)
        return MissingReply(tuple(found))

    async def put(self, blocks: AsyncIterator[bytes]) -> AsyncIterator[PutReply]:
        """Stage blocks; one answer each, in order."""
        # Read ahead of the answers: where a block goes may be far away.
        staging: asyncio.Queue[asyncio.Task[PutReply] | None] = asyncio.Queue(STAGED_AHEAD)

        async def take() -> None:
            try:
                async for block in blocks:
                    await staging.put(asyncio.create_task(self._stage(block)))
            except Exception:  # whatever broke the stream: who waits for its end must learn it
                await staging.put(None)
                raise
            await staging.put(None)

        taking = asyncio.create_task(take())
        try:
            while (task := await staging.get()) is not None:
                yield await task
            await taking
        finally:
            taking.cancel()

    async def _stage(self, block: bytes) -> PutReply:
        try:
            self._may("publish", None)
            name = await asyncio.to_thread(self._store.put_block, block)
        except WeightsError as error:
            metrics.REFUSALS.labels(error.code).inc()
            return PutReply(error=as_text(error))
        metrics.RECEIVED_BYTES.inc(len(block))
        return PutReply(name)

    async def commit(self, request: CommitRequest) -> VersionInfo:
        """Move the head."""
        run = run_of(request.manifest)
        self._may("publish", run)
        try:
            state = await asyncio.to_thread(
                self._store.commit,
                request.manifest,
                request.expected,
                request.on_base,
                request.encode_seconds,
            )
        except WeightsError as error:
            metrics.COMMITS.labels(run, error.code).inc()
            raise
        return self._published(state)

    async def part(self, request: PartRequest) -> PartReply:
        """One rank's part; answered when the version is the head, or when time is up."""
        self._may("publish", run_of_part(request.part))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.seconds, LONGEST_SECONDS)
        while True:
            moved = self._moved
            outcome = await asyncio.to_thread(
                self._parts.add,
                request.part,
                request.expected,
                request.encode_seconds,
                continues=request.continues,
            )
            left = deadline - loop.time()
            if outcome is not None and outcome.kept is None:
                self._wake()
                return PartReply(in_full=True)
            if outcome is not None and outcome.kept is not None:
                if outcome.completed_here:
                    self._published(outcome.state)
                return PartReply(info(outcome.kept))
            if left <= 0:
                return PartReply()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await moved.wait()

    async def record_attestation(self, request: AttestedRequest) -> AttestedReply:
        """What a receiver serves, by its own attestation."""
        self._may("publish" if request.trainer else "read", request.version.run)
        return await self._following.record(request)

    async def wait_reached(self, request: AwaitRequest) -> AwaitReply:
        """Answered when enough receivers serve a version, or when time is up."""
        self._may("read", request.version.run)
        return await self._following.wait_reached(request)

    def _may(self, right: Right, run: str | None) -> None:
        if run is not None and is_place(run):
            raise Forbidden(f"{run!r} holds a sandbox's session and no weights; take another name")
        self._access.check(peer(), right, run)

    def _published(self, state: RunState) -> VersionInfo:
        """A version is the head: tell who watches, and tidy up behind it."""
        kept = state.versions[-1]
        measure(state, kept)
        self._wake()
        self._tidying.schedule(state.run)
        return info(kept)

    def _wake(self) -> None:
        """Whoever watches or waits for other ranks looks again."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def close(self) -> None:
        """Wait for work in the background."""
        await self._tidying.close()

    async def _head(self, run: str) -> VersionInfo | None:
        try:
            state = await asyncio.to_thread(self._store.state, run)
        except UnknownRun:
            return None
        kept = state.kept(state.head)
        return None if kept is None else info(kept)
