"""The Publisher of a sharded trainer: every rank publishes what it holds, nobody gathers.

Each rank copies its own shards, compares and encodes them, and sends its blocks; then it sends its
*part*, and the store makes the version the head when the parts of all ranks are there
(``rose_core.delta.parts``). All parts or nothing: a rank that dies leaves the head where it was.
``DTensor`` placements of FSDP2 and tensor parallelism are understood: a shard along the first
dimension, along the last one, or both. What is replicated is published by the first rank that has
it. Works over ``torch.distributed``, which must be initialised; only what rank 0 heard from the
store when it opened the run goes over it, and the names of what ranks know.

The first version of an incarnation is an empty delta where the trainer resumed from a state that
was published before, by ranks that cut it alike: all ranks tell the store the digests of what they
own, and it finds the version. Else it goes out in full.

States of a version are those of ``publisher``; *encoded* becomes *durable* on all ranks at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from rose_core.delta import Digest, TensorEntry, faults
from rose_core.delta.digest import from_bytes
from rose_core.delta.parts import OwnedTensor, PartBuilder, RankPart, aligned
from rose_core.identity import WeightVersion, run_name
from rose_trainer import metrics
from rose_trainer.audience import Audience
from rose_trainer.errors import NotPublished, PublishFailed
from rose_trainer.lineage import Published, keeper
from rose_trainer.ondevice import Base, DeviceShards, Place, Where, in_place
from rose_trainer.shards import Shard, ShardSnapshot, TakenShards, shards_of
from rose_trainer.staging import Tensors, pairs
from rose_trainer.staleness import Consumed
from rose_trainer.takeover import open_run
from rose_weights.errors import WeightsError
from rose_weights.messages import Description, VersionInfo
from rose_weights.send.publishing import WeightsWriter
from rose_wire.errors import WireError

_ResultT = TypeVar("_ResultT")


class ShardedPublisher:
    """Publishes one run from all ranks of a process group; ``publish`` is called by every rank.

    Host memory per rank: two copies of its shards and its blocks of one version. ``publish``
    returns when the version is durable: the stall is the whole publish, so call it from a thread
    of the trainer if the next step need not wait.

    Args:
        address: ``host:port`` of the store.
        run: the run's name, a DNS label.
        token: the store's bearer token.
        dtype: cast floating-point tensors to this on the way.
        compare_on, keep_on: as the Publisher's; each rank decides by its own shards.
        group: the process group; None = all ranks.
        patience_seconds: how long the store or another rank may be away.

    Raises:
        PublishFailed: the store cannot be reached or refuses.
        ValueError: no run can have that name.
    """

    def __init__(
        self,
        address: str,
        run: str,
        *,
        token: str = "",
        dtype: torch.dtype | None = None,
        compare_on: Where = "host",
        keep_on: Place = "host",
        group: dist.ProcessGroup | None = None,
        patience_seconds: float = 1800.0,
    ) -> None:
        self._address = address
        self._token = token
        self._run = run_name(run)
        self._dtype = dtype
        self._compare_on = compare_on
        self._base = Base(keep_on)
        self._group = group
        self._patience = patience_seconds
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._loop = asyncio.new_event_loop()
        self._opened = self._open()
        self._head = self._opened.head.version if self._opened.head else None
        self._audience = Audience(address, token, (one.version for one in self._opened.versions))
        self._done: dict[WeightVersion, Published] = {}
        self._next = 0
        self._tensors: tuple[TensorEntry, ...] = ()
        self._before: TakenShards | None = None
        self._free: TakenShards | None = None
        self._digests: dict[int, Digest] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def incarnation(self) -> int:
        """These publishers' incarnation of the run."""
        return self._opened.fence

    def close(self) -> None:
        """End the publisher."""
        self._loop.close()

    def publish(self, step: int, tensors: Tensors) -> Published:
        """Publish the next version; returns when it is durable.

        Args:
            step: the trainer's label, the same on every rank.
            tensors: Hugging Face names and tensors or ``DTensor``s, in the same order everywhere.

        Raises:
            BadState: tensors that cannot be published; nothing was sent.
            PublishFailed: the version could not be published, on any rank.
        """
        began = time.monotonic()
        shards = shards_of(pairs(tensors), self._dtype, self._group)
        if not self._tensors:
            self._tensors = aligned(OwnedTensor(one.spec, one.box, one.chunk) for one in shards)
        snapshot = self._free or self._snapshot(shards)
        snapshot.take(shards)
        taken = time.monotonic()
        faults.at("publisher.snapshot")
        try:
            part, digest, encode_seconds = self._make(step, shards, snapshot)
        except BaseException:  # whatever it was, this state is nobody's base
            snapshot.discard()
            raise
        faults.at("publisher.committed")
        self._free, self._before = self._before, snapshot
        self._digests = dict(zip(part.tiles, from_bytes(part.digests), strict=True))
        self._head = part.target
        self._next += 1
        metrics.STALL_SECONDS.observe(time.monotonic() - began)
        metrics.ENCODE_SECONDS.observe(encode_seconds)
        seconds = time.monotonic() - taken
        published = self._published(part, digest, taken - began, seconds, encode_seconds)
        self._audience.note_taken(part.target, step)
        self._done[part.target] = published
        return published

    def wait(
        self,
        version: WeightVersion | int,
        timeout_seconds: float | None = None,
        *,
        quorum: float | None = None,
    ) -> Published:
        """Wait until enough engines serve a version; any rank may ask.

        Args:
            version: what was published, or the step it was given.
            timeout_seconds: for how long; None = for ever.
            quorum: as the Publisher's; without it there is nothing to wait for, since what
                ``publish`` returned is durable.

        Raises:
            NotPublished: this publisher has not published it.
            NotReached: the quorum was not met within ``timeout_seconds``.
        """
        found = self._done.get(self._audience.version_of(version))
        if found is None:
            message = f"{version} was not published by this publisher ({self._run}@..)"
            raise NotPublished(message)
        if quorum is not None:
            self._audience.wait_reached(found.version, quorum, timeout_seconds)
        return found

    def refer(self, version: WeightVersion | int, logprobs: Sequence[float]) -> None:
        """Say what the trainer computes with a version, as the Publisher's; one rank does.

        Raises:
            NotPublished: this publisher has not published it, or it is no longer kept.
            PublishFailed: the store cannot be reached.
        """
        self._audience.refer(self.wait(version), logprobs)

    def consume(self, version: WeightVersion | str, *, most: int | None = None) -> Consumed:
        """Say that a trajectory is used now, as the Publisher's.

        Raises:
            ValueError: the text is no version.
        """
        return self._audience.consume(version, most=most)

    def _snapshot(self, shards: Sequence[Shard]) -> TakenShards:
        if in_place(self._compare_on, (shard.local for shard in shards)):
            return DeviceShards(self._tensors, self._base)
        return ShardSnapshot()

    def _make(
        self, step: int, shards: Sequence[Shard], snapshot: TakenShards
    ) -> tuple[RankPart, str, float]:
        """This rank's part, durable; the whole version's digest; what comparing and coding took."""
        if self._digests is None and self._opened.versions:
            began = time.monotonic()
            bare = self._bare(step, shards, snapshot)
            compared = time.monotonic() - began
            if (same := self._continued(bare)) is not None:
                return bare, same.digest, compared
        began = time.monotonic()
        blocks: dict[bytes, bytes] = {}
        part = self._encode(step, shards, snapshot, blocks)
        encode_seconds = time.monotonic() - began
        faults.at("publisher.encoded")
        return part, self._send(part, blocks, encode_seconds), encode_seconds

    def _encode(
        self,
        step: int,
        shards: Sequence[Shard],
        snapshot: TakenShards,
        blocks: dict[bytes, bytes],
    ) -> RankPart:
        builder = PartBuilder(self._tensors, self._digests, keeper(blocks))
        for number, shard in enumerate(shards):
            if shard.owned:
                snapshot.add_to(builder, number, shard, self._before)
        base = self._head if self._digests is not None else None
        return self._finish(builder, step, base)

    def _bare(self, step: int, shards: Sequence[Shard], snapshot: TakenShards) -> RankPart:
        """Digests of what this rank owns, without blocks."""
        builder = PartBuilder(self._tensors, None, _ignore)
        for number, shard in enumerate(shards):
            if shard.owned:
                bits = snapshot.bits(shard.spec.name)
                builder.add(number, shard.box, None, bits, blocks=False)
        return self._finish(builder, step, None)

    def _finish(self, builder: PartBuilder, step: int, base: WeightVersion | None) -> RankPart:
        target = WeightVersion(self._run, self._opened.fence, self._next)
        return builder.finish(target, self.rank, self.world, base=base, step=step)

    def _send(self, part: RankPart, blocks: dict[bytes, bytes], encode_seconds: float) -> str:
        def send(writer: WeightsWriter) -> Awaitable[VersionInfo]:
            return writer.publish_part(
                part,
                blocks,
                self._head,
                encode_seconds=encode_seconds,
                patience_seconds=self._patience,
            )

        return self._asked(part, send).digest

    def _continued(self, bare: RankPart) -> VersionInfo | None:
        """This state as an empty delta from a kept version that it is; None = it must be sent."""

        def ask(writer: WeightsWriter) -> Awaitable[VersionInfo | None]:
            return writer.continue_part(bare, self._head, patience_seconds=self._patience)

        return self._asked(bare, ask)

    def _asked(
        self, part: RankPart, question: Callable[[WeightsWriter], Awaitable[_ResultT]]
    ) -> _ResultT:
        """What the store answers.

        Raises:
            PublishFailed: it refuses, or stayed away.
        """

        async def talk() -> _ResultT:
            async with WeightsWriter(self._address, token=self._token) as writer:
                return await question(writer)

        try:
            return self._loop.run_until_complete(talk())
        except (WeightsError, WireError) as error:
            message = f"{part.target} was not published by rank {self.rank}: {error}"
            raise PublishFailed(message) from error

    def _open(self) -> Description:
        """Rank 0 opens the incarnation; all ranks learn it, or why there is none."""
        descriptions: list[Description | str] = [self._opened_or_why() if self.rank == 0 else ""]
        dist.broadcast_object_list(descriptions, group=self._group, group_src=0)
        (found,) = descriptions
        if isinstance(found, str):
            raise PublishFailed(found)
        return found

    def _opened_or_why(self) -> Description | str:
        async def open_() -> Description:
            async with WeightsWriter(self._address, token=self._token) as writer:
                name = f"{socket.gethostname()}/{os.getpid()} and {self.world - 1} ranks"
                return await open_run(writer, self._address, self._run, name, self._patience)

        try:
            return self._loop.run_until_complete(open_())
        except (PublishFailed, WeightsError, WireError) as error:
            return f"run {self._run!r} cannot be published: {error}"

    def _published(
        self, part: RankPart, digest: str, stall: float, seconds: float, encode_seconds: float
    ) -> Published:
        """What became of the version; counts and encoding time are this rank's."""
        owned = sum(self._tile_elements(tile) for tile in part.tiles)
        return Published(
            version=part.target,
            step=part.step or 0,
            digest=digest,
            changes=sum(block.changes for block in part.blocks),
            elements=owned,
            bytes=sum(block.size for block in part.blocks),
            stall_seconds=stall,
            seconds=seconds,
            encode_seconds=encode_seconds,
        )

    def _tile_elements(self, tile: int) -> int:
        tensor = next(
            entry
            for entry in self._tensors
            if entry.first_tile <= tile < entry.first_tile + entry.tiling.count
        )
        return tensor.tiling.box(tile - tensor.first_tile).elements


def _ignore(_data: bytes) -> None:
    """A bare part emits nothing."""
