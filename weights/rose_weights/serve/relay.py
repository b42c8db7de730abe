"""One per serving cluster: each block crosses the boundary once, for all receivers.

A relay answers what receivers ask (describe, watch, plan, fetch) from the store behind it and keeps
blocks on its own disk. Blocks are named by their content, so nothing it keeps can be out of date.
Of several receivers that want the same block or the same plan at the same time one asks the store,
the others wait for it. Receivers that are several versions behind get one delta merged from what is
here (``RelayPlans``). Publishing is not offered here.

| block | next | when |
|---|---|---|
| absent | coming | the first receiver asks; the relay asks the store |
| coming | kept | it arrived and its hash is right; everybody waiting reads it from disk |
| coming | absent | the store went away; everybody waiting gets the reason and asks again |
| kept | absent | longest unused, when more than ``keep_bytes`` are kept, or damaged on disk |
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import grpc.aio
import msgspec

from rose_core.delta import DeltaError, Hop, LineageError, Manifest, faults
from rose_core.delta.codec import SELF_CONTAINED
from rose_core.delta.lineage import VersionLink, VersionPath, way
from rose_core.identity import WeightVersion
from rose_weights import metrics
from rose_weights.call_policy import ANSWER_SECONDS, ATTEMPTS, PLAN_SECONDS, understanding
from rose_weights.errors import Damaged, Forbidden, Incomplete, StoreFailed, WeightsError
from rose_weights.messages import (
    AttestedReply,
    AttestedRequest,
    DescribeRequest,
    Description,
    FetchRequest,
    PlanReply,
    PlanRequest,
    VersionInfo,
    WatchRequest,
)
from rose_weights.methods import ATTESTED, DESCRIBE, FETCH, PLAN, WATCH
from rose_weights.pieces import AHEAD_BYTES, PIECE_BYTES, Unpacker, pack
from rose_weights.serve.access import OPEN, StoreAccess
from rose_weights.serve.responses import answering, refusing
from rose_weights.store.blocks import Blocks
from rose_weights.store.merging import Merger
from rose_weights.store.rules import should_merge_here
from rose_wire import rpc
from rose_wire.errors import Unavailable
from rose_wire.rpc import Server, peer

BATCH_BLOCKS = 64
"""Blocks asked for in one call to the store."""

KEEP_BYTES = 64 << 30

MOST_SIZES = 2_000_000
"""Sizes of blocks remembered from plans; a block without one is asked for alone."""

PLANNED_HOPS = 64
"""Manifests of single deltas that are remembered."""
_Edge = tuple[WeightVersion | None, WeightVersion]


class RelayHandlers:
    """Handlers over a store elsewhere and a folder of blocks here.

    Args:
        channel: connection to the store (or to another relay).
        blocks: the folder.
        token: the store's bearer token.
        keep_bytes: what the folder may hold before the longest unused blocks go.
        access: who may read what; by default everybody everything, as nobody else gets in.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        blocks: Blocks,
        *,
        token: str = "",
        keep_bytes: int = KEEP_BYTES,
        access: StoreAccess | None = None,
    ) -> None:
        self._channel = channel
        self._blocks = blocks
        self._token = token
        self._keep = keep_bytes
        self._access = access or StoreAccess(OPEN)
        self._sizes: dict[bytes, int] = {}
        self._coming: dict[bytes, asyncio.Future[None]] = {}
        self._plans: dict[tuple[object, ...], asyncio.Task[PlanReply]] = {}
        self._nearby = RelayPlans(blocks, self._run, self._ask, self._bring_all)

    def bind(self, server: Server) -> None:
        """Offer the receivers' methods on a server."""
        server.unary(DESCRIBE, answering(self.describe))
        server.unary(PLAN, answering(self.plan))
        server.unary(ATTESTED, answering(self.forward_attestation))
        server.server_stream(WATCH, self.watch)
        server.server_stream(FETCH, self.fetch)

    async def describe(self, request: DescribeRequest) -> Description:
        """What the store says."""
        self._may_read(request.run or None)
        found, names = await self._describe(request), peer()
        readable = tuple(run for run in found.runs if self._access.allows(names, "read", run))
        return msgspec.structs.replace(found, runs=readable)

    async def _describe(self, request: DescribeRequest) -> Description:
        with understanding():
            return await rpc.call(
                self._channel, DESCRIBE, request, timeout=ANSWER_SECONDS, token=self._token
            )

    async def watch(self, request: WatchRequest) -> AsyncIterator[VersionInfo]:
        """What the store says; ends when the store's stream ends."""
        with refusing():
            self._may_read(request.run)
        async for head in rpc.receive(self._channel, WATCH, request, token=self._token):
            yield head

    async def forward_attestation(self, request: AttestedRequest) -> AttestedReply:
        """Passed on: the store counts who serves what. A receiver cannot speak as the trainer."""
        self._may_read(request.version.run)
        if request.trainer:
            message = "a relay passes no trainer's word on; a trainer tells the store itself"
            raise Forbidden(message)
        with understanding():
            return await rpc.call(
                self._channel, ATTESTED, request, timeout=ANSWER_SECONDS, token=self._token
            )

    async def plan(self, request: PlanRequest) -> PlanReply:
        """One manifest; receivers that ask the same at the same time share one answer."""
        self._may_read(request.run)
        key = (request.run, request.have, request.digest, request.want, request.codecs)
        task = self._plans.get(key)
        if task is None:
            task = asyncio.create_task(self._plan(request))
            self._plans[key] = task
            task.add_done_callback(lambda done: self._planned(key, done))
        return await asyncio.shield(task)

    async def fetch(self, request: FetchRequest) -> AsyncIterator[bytes]:
        """Blocks one after the other; those that are not here come from the store first."""
        with refusing():
            self._may_read(None)
        for start in range(0, len(request.names), BATCH_BLOCKS):
            names = request.names[start : start + BATCH_BLOCKS]
            with refusing():
                await self._bring(names, check=request.check)
            for group in self._groups(names):
                with refusing():
                    blocks = await self._read(group, check=request.check)
                for piece in pack(blocks):
                    metrics.SENT_BYTES.inc(len(piece))
                    faults.at("relay.piece")
                    yield piece
        await asyncio.to_thread(self._blocks.trim, self._keep)

    def _may_read(self, run: str | None) -> None:
        self._access.check(peer(), "read", run)

    def _planned(self, key: tuple[object, ...], task: asyncio.Task[PlanReply]) -> None:
        self._plans.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen, also when every receiver has gone meanwhile

    async def _plan(self, request: PlanRequest) -> PlanReply:
        plan = await self._nearby.plan(request)
        if len(self._sizes) > MOST_SIZES:
            self._sizes.clear()
        self._sizes.update({block.sha256: block.size for block in plan.manifest.blocks})
        faults.at("relay.plan")
        return plan.reply

    async def _run(self, run: str) -> Description:
        return await self._describe(DescribeRequest(run))

    async def _ask(self, request: PlanRequest) -> _RelayedPlan:
        with understanding():
            reply = await rpc.call(
                self._channel, PLAN, request, timeout=PLAN_SECONDS, token=self._token
            )
        try:
            manifest = Manifest.decode(reply.manifest)
        except DeltaError as error:
            message = f"the store's plan for {request.run} cannot be read: {error}"
            raise Damaged(message) from error
        self._sizes.update({block.sha256: block.size for block in manifest.blocks})
        return _RelayedPlan(reply, manifest)

    def _groups(self, names: Sequence[bytes]) -> Iterator[list[bytes]]:
        """Blocks to be read together."""
        group: list[bytes] = []
        size = 0
        for name in names:
            group.append(name)
            size += self._sizes.get(name, PIECE_BYTES)
            if size >= AHEAD_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group

    async def _read(self, names: Sequence[bytes], *, check: bool) -> list[bytes]:
        """Blocks' bytes, brought (again) where they are not here intact."""
        for _ in range(ATTEMPTS):  # one was damaged on disk, or its fetch failed
            try:
                return await asyncio.to_thread(self._blocks.read, names, check=check)
            except (Incomplete, Damaged):
                await self._bring(names, check=check)
        return await asyncio.to_thread(self._blocks.read, names, check=check)

    async def _bring_all(self, names: Sequence[bytes]) -> None:
        for start in range(0, len(names), BATCH_BLOCKS):
            await self._bring(names[start : start + BATCH_BLOCKS])

    async def _bring(self, names: Sequence[bytes], *, check: bool = False) -> None:
        # Claimed before the disk is looked at: what another receiver fetched meanwhile would
        # otherwise be missed there and cross the boundary again.
        mine = [name for name in dict.fromkeys(names) if name not in self._coming]
        others = [self._coming[name] for name in names if name in self._coming]
        loop = asyncio.get_running_loop()
        for name in mine:
            self._coming[name] = loop.create_future()
        try:
            absent = await asyncio.to_thread(self._blocks.missing, mine)
            if absent:
                await self._fetch(absent, check)
        finally:
            # Whoever waits looks at the disk again and, where the block is not there, asks itself.
            for name in mine:
                self._coming.pop(name).set_result(None)
        for future in others:
            await future

    async def _fetch(self, names: Sequence[bytes], check: bool) -> None:
        known = [name for name in names if name in self._sizes]
        with understanding():
            if known:
                await self._fetch_batch(FetchRequest(tuple(known), check))
            # Without a size nobody knows where a block ends, so those come one by one.
            for name in names:
                if name not in self._sizes:
                    await self._fetch_single(FetchRequest((name,), check))

    async def _fetch_batch(self, request: FetchRequest) -> None:
        names = iter(request.names)
        unpacker = Unpacker([self._sizes[name] for name in request.names])
        async for piece in rpc.receive(self._channel, FETCH, request, token=self._token):
            metrics.RECEIVED_BYTES.inc(len(piece))
            for data in unpacker.feed(piece):
                await self._keep_block(next(names), data)
        if unpacker.left:
            message = f"the store ended a fetch with {unpacker.left} blocks to come"
            raise Damaged(message)

    async def _fetch_single(self, request: FetchRequest) -> None:
        whole = bytearray()
        async for piece in rpc.receive(self._channel, FETCH, request, token=self._token):
            metrics.RECEIVED_BYTES.inc(len(piece))
            whole += piece
        await self._keep_block(request.names[0], bytes(whole))

    async def _keep_block(self, name: bytes, data: bytes | memoryview) -> None:
        faults.at("relay.block")
        try:
            found = await asyncio.to_thread(self._blocks.put, data)
        except OSError as error:
            message = f"cannot keep a block: {error.strerror or error}"
            raise StoreFailed(message) from error
        if found != name:
            message = f"block {name.hex()[:16]} arrived damaged at the relay"
            raise Damaged(message)


class _RelayedPlan(NamedTuple):
    """A plan as it is passed on, and what it says.

    Attributes:
        reply: with the manifest encoded, which is not done twice.
        manifest: of the reply.
    """

    reply: PlanReply
    manifest: Manifest


class RelayPlans:
    """Plans of a relay: versions whose single deltas it holds are merged here, not at the store.

    Receivers that followed along had the single deltas brought here already. For one that is
    several versions behind, their sum is made on the spot: nothing more crosses to the cluster,
    and it works while the store is away.

    | receiver and way | plan |
    |---|---|
    | no version, wrong digest, or no way by deltas | the store's |
    | one version behind | the store's; while it is away, the delta that is kept here |
    | several behind, most of the single deltas here | merged here |
    | several behind, little of them here | merged at the store: its sum is smaller than they are |

    Args:
        blocks: the relay's folder.
        describe: the store's description of a run.
        ask: the store's own plan, read.
        bring: makes blocks be in the folder.
    """

    def __init__(
        self,
        blocks: Blocks,
        describe: Callable[[str], Awaitable[Description]],
        ask: Callable[[PlanRequest], Awaitable[_RelayedPlan]],
        bring: Callable[[Sequence[bytes]], Awaitable[None]],
    ) -> None:
        self._blocks = blocks
        self._describe = describe
        self._ask = ask
        self._bring = bring
        self._merger = Merger(blocks, self._keep)
        self._known: dict[str, Description] = {}
        self._hops: OrderedDict[_Edge, Manifest] = OrderedDict()

    async def plan(self, request: PlanRequest) -> _RelayedPlan:
        """One row of the table above.

        Raises:
            WeightsError: the store's reason, or a block that cannot be had.
            Unavailable: the store is away and this cannot be had without it.
        """
        known = await self._run(request) if request.have is not None else None
        through = _way_by_deltas(known, request) if known is not None else None
        if known is None or through is None:
            return await self._store(request)
        if through.hops == 1 and through.forward:
            return await self._single(request, through)
        try:
            hops = await self._edges(known, through, request)
            absent = await asyncio.to_thread(self._absent, hops)
            if should_merge_here(hops, absent):
                return await self._merge(hops)
        except (WeightsError, LineageError):
            pass  # damaged or folded meanwhile: the store knows better
        return await self._store(request)

    async def _run(self, request: PlanRequest) -> Description | None:
        try:
            self._known[request.run] = await self._describe(request.run)
        except Unavailable:
            if request.run not in self._known:
                raise
        return self._known[request.run]

    async def _single(self, request: PlanRequest, through: VersionPath) -> _RelayedPlan:
        try:
            return await self._store(request)
        except Unavailable:
            found = self._hops.get((request.have, through.forward[0]))
            if found is None:
                raise
            return _RelayedPlan(PlanReply(found.encode(), 1), found)

    async def _store(self, request: PlanRequest) -> _RelayedPlan:
        plan = await self._ask(request)
        manifest = plan.manifest
        mergeable = all(block.codec in SELF_CONTAINED for block in manifest.blocks)
        if plan.reply.merged == 1 and mergeable and manifest.base is not None:
            self._hops[manifest.base, manifest.target] = manifest
            while len(self._hops) > PLANNED_HOPS:
                self._hops.popitem(last=False)
        return plan

    async def _edges(
        self, known: Description, through: VersionPath, request: PlanRequest
    ) -> list[Hop]:
        """The published deltas on the way; the receiver's own version is leased in its name."""
        listed = {info.version: info for info in known.versions}
        hops = [Hop(await self._edge(listed, at, request), back=True) for at in through.back]
        return hops + [Hop(await self._edge(listed, at, request)) for at in through.forward]

    async def _edge(
        self, listed: dict[WeightVersion, VersionInfo], at: WeightVersion, request: PlanRequest
    ) -> Manifest:
        base = listed[at].base
        found = self._hops.get((base, at))
        first = request.have in {base, at}
        if found is None or first:
            digest = listed[base].digest if base is not None else ""
            single = PlanRequest(request.run, base, digest, at, request.holder if first else "")
            try:
                manifest = (await self._store(single)).manifest
            except Unavailable:
                if found is None:
                    raise
                manifest = found
            found = manifest
        return found

    async def _merge(self, hops: Sequence[Hop]) -> _RelayedPlan:
        names = [block.sha256 for hop in hops for block in hop.manifest.blocks]
        await self._bring(names)
        merged = await asyncio.to_thread(self._merger.merged, hops)
        metrics.RELAY_MERGES.inc()
        faults.at("relay.merged")
        return _RelayedPlan(PlanReply(merged.encode(), len(hops)), merged)

    def _absent(self, hops: Sequence[Hop]) -> int:
        """Bytes of the hops' blocks that are not here."""
        sizes = {block.sha256: block.size for hop in hops for block in hop.manifest.blocks}
        return sum(sizes[name] for name in self._blocks.missing(sizes))

    def _keep(self, data: bytes) -> None:
        try:
            self._blocks.put(data)
        except OSError as error:
            message = f"cannot keep a merged block: {error.strerror or error}"
            raise StoreFailed(message) from error


def _way_by_deltas(known: Description, request: PlanRequest) -> VersionPath | None:
    """The way by deltas between the versions the request names; None when the store must say."""
    listed = {info.version: info for info in known.versions}
    want = request.want or (known.head.version if known.head else None)
    have = request.have
    if have is None or want is None or have not in listed or want not in listed:
        return None
    if listed[have].digest != request.digest or have == want:
        return None
    lineage = {
        info.version: VersionLink(info.base, full=False, bytes=info.bytes)
        for info in known.versions
    }
    try:
        return way(have, want, lineage)
    except LineageError:
        return None
