"""A relay's own plans: versions whose single deltas it holds are merged here, not at the store.

Every receiver that followed along has had the single deltas brought here already. For one that is
several versions behind, their sum is made on the spot: nothing more crosses to the cluster, and it
works while the store is away. What cannot be had that way is asked of the store.

| receiver and way | plan |
|---|---|
| no version, wrong digest, or no way by deltas | the store's |
| one version behind | the store's; while it is away, the delta that is kept here |
| several behind, most of the single deltas here | merged here |
| several behind, little of them here | merged at the store: its sum is smaller than they are |
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from rose_core.delta import Hop, LineageError, Manifest, faults
from rose_core.delta.codec import SELF_CONTAINED
from rose_core.delta.lineage import VersionLink, VersionPath, way
from rose_core.identity import WeightVersion
from rose_weights import metrics
from rose_weights.errors import StoreFailed, WeightsError
from rose_weights.messages import Description, PlanReply, PlanRequest, VersionInfo
from rose_weights.store.blocks import Blocks
from rose_weights.store.merging import Merger
from rose_weights.store.rules import merge_here
from rose_wire.errors import Unavailable

HOPS = 64
"""Manifests of single deltas that are remembered."""

_Edge = tuple[WeightVersion | None, WeightVersion]


class RelayPlans:
    """Plans from what a relay holds.

    Args:
        blocks: the relay's folder.
        describe: what the store says about a run.
        ask: the store's own plan, read.
        bring: makes blocks be in the folder.
    """

    def __init__(
        self,
        blocks: Blocks,
        describe: Callable[[str], Awaitable[Description]],
        ask: Callable[[PlanRequest], Awaitable[tuple[PlanReply, Manifest]]],
        bring: Callable[[Sequence[bytes]], Awaitable[None]],
    ) -> None:
        self._blocks = blocks
        self._describe = describe
        self._ask = ask
        self._bring = bring
        self._merger = Merger(blocks, self._keep)
        self._known: dict[str, Description] = {}
        self._hops: OrderedDict[_Edge, Manifest] = OrderedDict()

    async def plan(self, request: PlanRequest) -> tuple[PlanReply, Manifest]:
        """One row of the module's table.

        Raises:
            WeightsError: the store's reason, or a block that cannot be had.
            Unavailable: the store is away and this cannot be had without it.
        """
        known = await self._run(request) if request.have is not None else None
        through = _way(known, request) if known is not None else None
        if known is None or through is None:
            return await self._store(request)
        if through.hops == 1 and through.forward:
            return await self._single(request, through)
        try:
            hops = await self._edges(known, through, request)
            absent = await asyncio.to_thread(self._absent, hops)
            if merge_here(hops, absent):
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

    async def _single(
        self, request: PlanRequest, through: VersionPath
    ) -> tuple[PlanReply, Manifest]:
        try:
            return await self._store(request)
        except Unavailable:
            found = self._hops.get((request.have, through.forward[0]))
            if found is None:
                raise
            return PlanReply(found.encode(), 1), found

    async def _store(self, request: PlanRequest) -> tuple[PlanReply, Manifest]:
        reply, manifest = await self._ask(request)
        mergeable = all(block.codec in SELF_CONTAINED for block in manifest.blocks)
        if reply.merged == 1 and mergeable and manifest.base is not None:
            self._hops[manifest.base, manifest.target] = manifest
            while len(self._hops) > HOPS:
                self._hops.popitem(last=False)
        return reply, manifest

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
                _, manifest = await self._store(single)
            except Unavailable:
                if found is None:
                    raise
                manifest = found
            found = manifest
        return found

    async def _merge(self, hops: Sequence[Hop]) -> tuple[PlanReply, Manifest]:
        names = [block.sha256 for hop in hops for block in hop.manifest.blocks]
        await self._bring(names)
        merged = await asyncio.to_thread(self._merger.merged, hops)
        metrics.RELAY_MERGES.inc()
        faults.at("relay.merged")
        return PlanReply(merged.encode(), len(hops)), merged

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


def _way(known: Description, request: PlanRequest) -> VersionPath | None:
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
