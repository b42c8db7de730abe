"""How much device memory an engine takes, and whether it is there: asked before it starts.

An engine of a GPU class gets an explicit KV pool (the lease's tokens) and the fraction of the
device that weights and pool make, so that it never sizes itself by what happens to be free. Sizes
come from the model's folder: the weights' files, and the shape in ``config.json``. Too little free
memory is a failure with the figures that is tried again, because serving may need less later. An
elastic engine needs its weights and the least of its cache; its fraction is that of the whole,
since it has addresses for all of it from the start.

An engine that starts has not taken its memory yet, so what it was promised counts as taken until
it serves or is gone: two engines that start together (a slot's pair, two slots) never both count
on the same bytes. What it takes meanwhile counts twice, which errs safely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.errors import DeviceError
from rose_agent.host.elastic import PAGE_BYTES
from rose_agent.host.errors import BadEngine, NoMemory
from rose_core.devices.elastic import FIRST_PERMILLE
from rose_core.devices.memory import WHOLE, EngineSize
from rose_core.wire.sync import EngineSpec

# Context, workspaces and graphs of an engine on a GPU.
FIXED_BYTES = 3 << 30
_KV_BYTES = 2  # bfloat16, the only type the allow-list passes


class _Shape(msgspec.Struct):
    """The part of ``config.json`` that a KV cache is made of."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None


class _Words(msgspec.Struct):
    """The part of ``config.json`` that the embedding is made of."""

    vocab_size: int | None = None
    text_config: _Words | None = None


def vocabulary(model: Path) -> int:
    """Rows of the model's embedding: ids of tokens are below it; 0 = its folder does not say."""
    try:
        words = msgspec.json.decode((model / "config.json").read_bytes(), type=_Words)
    except (OSError, msgspec.MsgspecError):
        return 0
    inner = words.text_config.vocab_size if words.text_config is not None else None
    return words.vocab_size or inner or 0


def engine_size(model: Path, spec: EngineSpec) -> EngineSize:
    """Size of an engine.

    Raises:
        BadEngine: the model's folder does not say.
    """
    try:
        shape = msgspec.json.decode((model / "config.json").read_bytes(), type=_Shape)
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    except (OSError, msgspec.MsgspecError) as error:
        raise BadEngine(f"model {model.name}: its size cannot be told: {error}") from error
    heads = shape.num_key_value_heads or shape.num_attention_heads
    width = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    per_token = 2 * shape.num_hidden_layers * heads * width * _KV_BYTES
    first = FIRST_PERMILLE if spec.sharing.memory_source == "Elastic" else WHOLE
    bundle = 2 * shape.num_hidden_layers * PAGE_BYTES
    return EngineSize(weights, per_token, spec.kv_tokens, FIXED_BYTES, first, bundle)


@dataclass(frozen=True)
class Sizer:
    """Whether engines fit on their GPUs.

    Attributes:
        driver: None on machines without GPUs; then nothing is refused.
        promised: engine -> the GPUs it starts on, and bytes on each.
    """

    driver: DeviceDriver | None = None
    promised: dict[str, tuple[frozenset[str], int]] = field(default_factory=dict)

    def claim(self, engine: str, size: EngineSize, gpu_uuids: Sequence[str]) -> float:
        """Promise the engine its memory.

        Args:
            engine: whose start it is; ``settle`` ends the promise, another claim replaces it.
            size: what it takes on each GPU.
            gpu_uuids: those of its grant.

        Returns:
            Share of each GPU for weights and KV pool.

        Raises:
            NoMemory: one of the GPUs has too little free memory, or does not say.
            BadEngine: no GPU was named.
        """
        self.settle(engine)
        if self.driver is None or not gpu_uuids:
            raise BadEngine("an engine on a GPU needs --devices nvml and a GPU of the grant")
        fraction = max(self._fraction(self.driver, size, uuid) for uuid in gpu_uuids)
        self.promised[engine] = (frozenset(gpu_uuids), size.start)
        return fraction

    def settle(self, engine: str) -> None:
        """The engine serves, so the driver counts its memory, or it is gone."""
        self.promised.pop(engine, None)

    def _fraction(self, driver: DeviceDriver, size: EngineSize, uuid: str) -> float:
        try:
            memory = driver.memory(uuid)
        except DeviceError as error:
            raise NoMemory(f"GPU {uuid}: {error}") from error
        if memory.used_bytes is None:
            raise NoMemory(f"GPU {uuid} does not say how much of its memory is in use")
        free = memory.total_bytes - memory.used_bytes
        promised = sum(taken for gpus, taken in self.promised.values() if uuid in gpus)
        if size.start > free - promised:
            starting = f", {promised >> 20} promised to engines that start" if promised else ""
            raise NoMemory(
                f"the engine needs {size.start >> 20} MiB (weights {size.weights >> 20}, "
                f"KV {size.kv * size.first_permille // WHOLE >> 20}, fixed {size.fixed >> 20}); "
                f"GPU {uuid} has {free >> 20} MiB free of {memory.total_bytes >> 20}{starting}"
            )
        return size.fraction(memory.total_bytes)
