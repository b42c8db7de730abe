"""A run that is published to a real store, starting from an engine's own model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from rose_core.delta import Builder, Manifest, TensorSpec, name_of, table
from rose_core.delta.bits import Bits
from rose_core.identity import WeightVersion
from rose_engines.tensors.safetensors import read_checkpoint
from rose_weights.send.publishing import WeightsWriter
from rose_weights.serve.service import WeightService
from rose_weights.store.store import Store
from rose_wire.rpc import Server

RUN = "grpo"

ENCODE_SECONDS = 0.125
"""What the publisher says of every version."""


class PublishedRun:
    """Publishes changes of a model to ``address``."""

    def __init__(self, address: str, model: Path, run: str = RUN) -> None:
        self.address = address
        self.run = run
        self._writer = WeightsWriter(address)
        self._model = model
        self.state: dict[str, Bits] = {}
        self.manifest: Manifest | None = None
        self._sequence = 0
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}

    async def publish(self, *, change: bool = True) -> Manifest:
        """Publish the next version; the first is the model as it is."""
        if self.manifest is None:
            stored = read_checkpoint(self._model)
            self._kinds = {name: parts[:2] for name, parts in stored.items()}
            self.state = {name: np.array(parts[2]) for name, parts in stored.items()}
            await self._writer.open(self.run, "test")
        before = {name: bits.copy() for name, bits in self.state.items()}
        if change and self.manifest is not None:
            for bits in self.state.values():
                bits[:: max(1, bits.size // 7)] ^= bits.dtype.type(1)
        return await self._send(before)

    async def _send(self, before: dict[str, Bits]) -> Manifest:
        blocks: dict[bytes, bytes] = {}
        tensors = table(TensorSpec(name, *kind) for name, kind in self._kinds.items())
        base = self.manifest
        builder = Builder(tensors, base, lambda data: blocks.update({name_of(data): data}))
        for tensor in tensors:
            old = None if base is None else before[tensor.name]
            builder.add(old, self.state[tensor.name])
        manifest = builder.finish(WeightVersion(self.run, 1, self._sequence))
        await self._writer.publish(
            manifest,
            blocks,
            base.target if base is not None else None,
            encode_seconds=ENCODE_SECONDS,
        )
        self.manifest = manifest
        self._sequence += 1
        return manifest

    async def close(self) -> None:
        await self._writer.__aexit__(None, None, None)


@contextlib.asynccontextmanager
async def store_at(folder: Path, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """A weight store; yields its address."""
    server = Server()
    service = WeightService(Store(folder))
    service.bind(server)
    host = address.rpartition(":")[0]
    port = await server.start(address)
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(0.0)
        await service.close()
