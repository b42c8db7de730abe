"""How much device memory an engine takes, and whether it is there: asked before it starts.

An engine of a GPU class gets an explicit KV pool (the lease's tokens) and the fraction of the
*free* memory that weights and pools make (``EngineSize.fraction``), so that it never sizes itself
by what happens to be free. Sizes come from the model's folder: the headers of its files and its
``config.json`` (``rose_core.devices.model_size``), and what the engine takes besides from what
engines of its kind were seen to hold on this node (``footprints``). Too little free memory is a
failure with the figures that is tried again, because serving may need less later. An elastic
engine needs its weights and the least of its cache; its fraction is that of the whole, since it
has addresses for all of it from the start.

An engine that starts has not taken its memory yet, so what it was promised counts as taken until
it serves or is gone: two engines that start together (a slot's pair, two slots) never both count
on the same bytes. What it takes meanwhile counts twice, which errs safely. The driver may answer
after seconds, so all of this is asked by one thread of the host's own (``Site.ask``), which also
makes claims one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose_agent.devices.driver import DeviceDriver
from rose_agent.errors import BadEngine, DeviceError, NoMemory
from rose_agent.host.memory.elastic import PAGE_BYTES
from rose_agent.host.memory.footprints import Footprints, engine_version, kind_of
from rose_core.devices.elastic import FIRST_PERMILLE
from rose_core.devices.footprint import estimate, promised
from rose_core.devices.memory import WHOLE, EngineSize, in_gib
from rose_core.devices.model_size import (
    CacheShape,
    Unsizable,
    adapter_bytes,
    cache_shape,
    weight_bytes,
)
from rose_core.identity import GpuUuid
from rose_core.unreadable import UNREADABLE
from rose_core.wire.sync import EngineSpec
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.safetensors import list_tensors


@dataclass(frozen=True)
class EngineSizing:
    """An engine's size, and what it follows from.

    Attributes:
        shape: of the model's caches.
        kind: name under which its footprint is remembered.
    """

    size: EngineSize
    shape: CacheShape
    kind: str


class _ModelConfig(msgspec.Struct):
    """The part of ``config.json`` that the embedding is made of."""

    vocab_size: int | None = None
    text_config: _ModelConfig | None = None


def vocabulary(model: Path) -> int:
    """Rows of the model's embedding: ids of tokens are below it; 0 = its folder does not say."""
    try:
        known = msgspec.json.decode((model / "config.json").read_bytes(), type=_ModelConfig)
    except (OSError, *UNREADABLE):
        return 0
    inner = known.text_config.vocab_size if known.text_config is not None else None
    return known.vocab_size or inner or 0


def engine_size(
    model: Path, spec: EngineSpec, footprints: Footprints, *, version: str = "", gpu: str = ""
) -> EngineSizing:
    """Size of an engine on each of its GPUs.

    Args:
        model: its folder.
        spec: how it is run.
        footprints: what such engines were seen to hold.
        version: of the engine's program.
        gpu: product name of its GPU.

    Raises:
        BadEngine: the model's folder does not say, or names what cannot be sized, or elastic memory
            was asked for over several GPUs.
    """
    elastic = spec.sharing.memory_source == "Elastic"
    if elastic and spec.ranks > 1:
        # The ranks would share one segment, in which each counts its own pages.
        why = f"gpusPerSlot is {spec.ranks}: memorySource Elastic is for slots of one GPU"
        raise BadEngine(f"model {model.name}: {why}")
    try:
        text = (model / "config.json").read_bytes()
        config = msgspec.json.decode(text, type=dict[str, object])
        shape = cache_shape(config, spec.ranks)
        weights = weight_bytes(config, list_tensors(model), spec.ranks)
        if (adapter := spec.adapter) is not None:
            weights += adapter_bytes(
                list_tensors(model), adapter.rank, adapter.targets, adapter.slots
            )
    except (OSError, *UNREADABLE, UnsupportedEngine, Unsizable) as error:
        raise BadEngine(f"model {model.name}: its size cannot be told: {error}") from error
    kind = kind_of(spec, text, version, gpu)
    estimated = estimate(spec.arguments, spec.max_running, latent=shape.latent)
    size = EngineSize(
        weights=weights,
        kv_per_token=shape.per_token,
        kv_tokens=spec.kv_tokens,
        fixed=promised(footprints.find(kind), estimated),
        first_permille=FIRST_PERMILLE if elastic else WHOLE,
        kv_bundle=2 * shape.layers * PAGE_BYTES,
        state=shape.state_bytes(spec.max_running),
    )
    return EngineSizing(size, shape, kind)


@dataclass(frozen=True)
class Sizer:
    """Whether engines fit on their GPUs.

    Attributes:
        driver: None on machines without GPUs; then nothing is refused.
        footprints: what engines were seen to hold on this node.
        promised: engine -> the GPUs it starts on, and bytes on each.
    """

    driver: DeviceDriver | None = None
    footprints: Footprints = field(default_factory=Footprints)
    promised: dict[str, tuple[frozenset[str], int]] = field(default_factory=dict)

    def size(
        self, model: Path, spec: EngineSpec, python: Path, gpu_uuids: Sequence[GpuUuid]
    ) -> EngineSizing:
        """Size of an engine on these GPUs.

        Raises:
            BadEngine: it is not known, or no GPU was named.
            NoMemory: the driver does not say what GPU it is.
        """
        if self.driver is None or not gpu_uuids:
            raise BadEngine("an engine on a GPU needs --devices nvml and a GPU of the grant")
        try:
            names = {gpu.uuid: gpu.name for gpu in self.driver.gpus()}
        except DeviceError as error:
            raise NoMemory(f"GPU {gpu_uuids[0]}: {error}") from error
        name = names.get(gpu_uuids[0], "")
        version = engine_version(python)
        return engine_size(model, spec, self.footprints, version=version, gpu=name)

    def claim(
        self, engine: str, size: EngineSize, gpu_uuids: Sequence[GpuUuid], *, limited: bool = False
    ) -> float:
        """Promise the engine its memory.

        Args:
            engine: whose start it is; ``settle`` ends the promise, another claim replaces it.
            size: what it takes on each GPU.
            gpu_uuids: those of its grant.
            limited: the driver shows it no more memory than its size.

        Returns:
            Share of the free memory for weights and pools (``--mem-fraction-static``).

        Raises:
            NoMemory: one of the GPUs has too little free memory, or does not say.
            BadEngine: no GPU was named.
        """
        self.settle(engine)
        if self.driver is None or not gpu_uuids:
            raise BadEngine("an engine on a GPU needs --devices nvml and a GPU of the grant")
        free = min(self._free(self.driver, size, uuid) for uuid in gpu_uuids)
        self.promised[engine] = (frozenset(gpu_uuids), size.start)
        return size.fraction(min(free, size.total) if limited else free)

    def settle(self, engine: str) -> None:
        """The engine serves, so the driver counts its memory, or it is gone."""
        self.promised.pop(engine, None)

    def _free(self, driver: DeviceDriver, size: EngineSize, uuid: GpuUuid) -> int:
        """What the engine will find free, at least."""
        try:
            memory = driver.memory(uuid)
        except DeviceError as error:
            raise NoMemory(f"GPU {uuid}: {error}") from error
        if memory.used_bytes is None:
            raise NoMemory(f"GPU {uuid} does not say how much of its memory is in use")
        free = memory.total_bytes - memory.used_bytes
        # A copy: what has settled meanwhile is taken out by another thread.
        others = tuple(self.promised.values())
        promised = sum(taken for gpus, taken in others if uuid in gpus)
        if size.start > free - promised:
            starting = f", {in_gib(promised)} promised to engines that start" if promised else ""
            first = size.kv * size.first_permille // WHOLE
            state = f", states {in_gib(size.state)}" if size.state else ""
            raise NoMemory(
                f"the engine needs {in_gib(size.start)} (weights {in_gib(size.weights)}, "
                f"KV {in_gib(first)}{state}, fixed {in_gib(size.fixed)}); "
                f"GPU {uuid} has {in_gib(free)} free of {in_gib(memory.total_bytes)}{starting}",
                size.start,
            )
        return free - promised
