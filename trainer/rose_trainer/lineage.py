"""One publisher's line of versions: compare with the state before, encode, send.

Runs in the Publisher's thread. Holds the last durable state (a snapshot) and its manifest; both are
replaced together, and only after the store has moved the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from rose_core.delta import Builder, Manifest, TensorEntry, faults, name_of, table
from rose_core.identity import WeightVersion
from rose_trainer import metrics
from rose_trainer.staging import Taken
from rose_weights.errors import BadManifest, Damaged
from rose_weights.messages import Description, VersionInfo
from rose_weights.send.publishing import WeightsWriter


@dataclass(frozen=True)
class Published:
    """What became of one version.

    Attributes:
        version: its identity.
        step: the trainer's label.
        digest: of the whole state; what engines attest.
        changes, elements: elements whose bits changed, and all there are.
        bytes: size of the blocks sent.
        stall_seconds: time ``publish`` took; the rest happened in the background.
        seconds: from the snapshot until it was durable.
        encode_seconds: of them comparing and encoding; sending came after.
    """

    version: WeightVersion
    step: int
    digest: str
    changes: int
    elements: int
    bytes: int
    stall_seconds: float
    seconds: float
    encode_seconds: float = 0.0


@dataclass
class PublishJob:
    """A snapshot on its way.

    Attributes:
        stall_seconds: what taking it cost the trainer.
        taken: monotonic seconds when it was taken.
    """

    version: WeightVersion
    step: int
    snapshot: Taken
    stall_seconds: float
    taken: float


@dataclass(frozen=True)
class _Coded:
    """A version ready to be sent.

    Attributes:
        smaller: the same one coded on its base, where that was asked for.
        seconds: what comparing and encoding took.
    """

    manifest: Manifest
    smaller: Manifest | None
    blocks: dict[bytes, bytes]
    seconds: float


class PublishLine:
    """Publishes jobs one after the other.

    Args:
        writer: the store.
        opened: the run as the store described it when this incarnation was opened.
        anchor: send the first version in full.
        on_base: send blocks coded on their base too.
        patience_seconds: how long the store may be away.
    """

    def __init__(
        self,
        writer: WeightsWriter,
        opened: Description,
        *,
        anchor: bool,
        on_base: bool,
        patience_seconds: float,
    ) -> None:
        self._writer = writer
        self._known = opened.versions
        self._head = opened.head.version if opened.head else None
        self._anchor = anchor
        self._on_base = on_base
        self._patience = patience_seconds
        self._tensors: tuple[TensorEntry, ...] = ()
        self._manifest: Manifest | None = None
        self._before: Taken | None = None

    async def publish(self, job: PublishJob) -> tuple[Published, Taken | None]:
        """Publish one job.

        Returns:
            What became of it, and the snapshot that is free again.

        Raises:
            WeightsError: the store refuses it, for good.
            Unavailable: the store stayed away.
        """
        blocks: dict[bytes, bytes] = {}
        began = time.monotonic()
        coded = _Coded(*self._encode(job, blocks), blocks, time.monotonic() - began)
        encoded = time.monotonic()
        faults.at("publisher.encoded")
        manifest = await self._sent(job, coded)
        done = time.monotonic()
        faults.at("publisher.committed")
        metrics.ENCODE_SECONDS.observe(coded.seconds)
        metrics.SEND_SECONDS.observe(done - encoded)
        metrics.CHANGED_RATIO.set(manifest.changes / max(manifest.elements, 1))
        metrics.BYTES.inc(manifest.block_bytes)
        metrics.VERSIONS.inc()
        free, self._before = self._before, job.snapshot
        self._head, self._manifest = manifest.target, manifest
        return _published(job, manifest, done, coded.seconds), free

    async def _sent(self, job: PublishJob, coded: _Coded) -> Manifest:
        """The manifest that the store has made the head.

        Two refusals can be made good here. A first version that continues another one is sent in
        full where that one was folded meanwhile, damaged, or cut into other tiles by a sharded
        publisher. A damaged manifest of the version before is in our hands still.
        """
        try:
            await self._send(coded)
        except (BadManifest, Damaged) as error:
            before = self._manifest
            if before is not None and isinstance(error, Damaged):
                await self._writer.restore(before)
            elif before is None and coded.manifest.base is not None:
                alone = self._alone(job, coded.blocks)
                coded = replace(coded, manifest=alone, smaller=None)
            else:
                raise
            await self._send(coded)
        return coded.manifest

    async def _send(self, coded: _Coded) -> None:
        await self._writer.publish(
            coded.manifest,
            coded.blocks,
            self._head,
            on_base=coded.smaller,
            encode_seconds=coded.seconds,
            patience_seconds=self._patience,
        )

    def _encode(
        self, job: PublishJob, blocks: dict[bytes, bytes]
    ) -> tuple[Manifest, Manifest | None]:
        """The version, and the same one coded on its base where that was asked for."""
        if self._manifest is None or self._before is None:
            return self._first(job, blocks), None
        builder = Builder(
            self._tensors,
            self._manifest,
            keeper(blocks),
            job.snapshot.layout.tied,
            on_base=self._on_base,
        )
        for tensor in self._tensors:
            job.snapshot.add_to(builder, tensor.name, self._before)
        manifest = builder.finish(job.version, job.step)
        return manifest, builder.on_base(manifest)

    def _first(self, job: PublishJob, blocks: dict[bytes, bytes]) -> Manifest:
        self._tensors = table(job.snapshot.layout.specs)
        bare = self._bare(job)
        same = latest(self._known, bare.digest)
        if same is not None:
            return msgspec.structs.replace(
                bare, base=same.version, base_digest=same.digest, base_tiles=bare.tiles
            )
        return self._alone(job, blocks) if self._anchor else bare

    def _alone(self, job: PublishJob, blocks: dict[bytes, bytes]) -> Manifest:
        """A version that needs no other: in full, or where that is not wanted its digests."""
        if not self._anchor:
            return self._bare(job)
        builder = Builder(self._tensors, None, keeper(blocks), job.snapshot.layout.tied)
        for tensor in self._tensors:
            builder.add(None, job.snapshot.bits(tensor.name))
        return builder.finish(job.version, job.step)

    def _bare(self, job: PublishJob) -> Manifest:
        builder = Builder(self._tensors, None, _ignore, job.snapshot.layout.tied)
        for tensor in self._tensors:
            builder.add(None, job.snapshot.bits(tensor.name), blocks=False)
        return builder.finish(job.version, job.step)


def latest(known: Iterable[VersionInfo], digest: str) -> VersionInfo | None:
    """The last kept version with this digest."""
    return next((version for version in reversed(tuple(known)) if version.digest == digest), None)


def _published(
    job: PublishJob, manifest: Manifest, done: float, encode_seconds: float
) -> Published:
    return Published(
        version=job.version,
        step=job.step,
        digest=manifest.digest,
        changes=manifest.changes,
        elements=manifest.elements,
        bytes=manifest.block_bytes,
        stall_seconds=job.stall_seconds,
        seconds=done - job.taken,
        encode_seconds=encode_seconds,
    )


def keeper(blocks: dict[bytes, bytes]) -> Callable[[bytes], None]:
    """Puts blocks under their names."""

    def keep(data: bytes) -> None:
        blocks[name_of(data)] = data

    return keep


def _ignore(_data: bytes) -> None:
    """A bare manifest emits nothing."""
