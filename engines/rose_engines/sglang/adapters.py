"""Where SGLang keeps the adapters that it computes with, found by letting it load some.

An engine that is started for adapters has none yet. So SGLang's own LoRA path is given as many as
it shall hold, of random bits, under a lease's rank and modules, and takes them into slots of its
pool; where each tensor of them lies there is *proved* by those bits. Then they are zeroed: the
engine computes as the base alone until the first commits. The slots are pinned, so no other adapter
and no base-only batch can take them, and every request is given one of these (``plugin``).

The base is proved too, as the weights of any engine are: SGLang's loader is called once more on the
wrapped model, and live bytes must equal the checkpoint's. Next step:
``rose_engines.weights.adapters``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rose_core.adapters import BASE, SCALE, STACKS, engine_name, tensor_name
from rose_core.wire.sync import AdapterSpec
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors import layout, parameters
from rose_engines.tensors.canonical import LiveTensor
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.adapters import BaseDigest, scale_tensor
from rose_engines.weights.live import digest_live, zero

_WRAPPED = ".base_layer."
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class AdapterPool(NamedTuple):
    """What SGLang's pool holds.

    Attributes:
        adapters: tensors of each, with its factor and its base's digest.
        slot_bytes: memory that one of them takes, read from the pool.
    """

    adapters: tuple[dict[str, LiveTensor], ...]
    slot_bytes: int


def read_pool(scheduler: Any, folder: Path, spec: AdapterSpec) -> AdapterPool:  # noqa: ANN401
    """The engine's adapters, all zero.

    Args:
        scheduler: SGLang's, at its first iteration.
        folder: where the base's layout is kept for the next start.
        spec: rank, modules and number.

    Raises:
        UnsupportedEngine: the engine cannot run adapters exactly; says why.
    """
    runner = scheduler.tp_worker.model_runner
    manager = getattr(runner, "lora_manager", None)
    if manager is None or int(scheduler.tp_size) > 1:
        raise UnsupportedEngine("an adapter needs SGLang's LoRA manager and one rank")
    base = _base(runner.model, Path(scheduler.server_args.model_path), folder)
    parts = list(_parts(manager, spec))
    if not parts:
        raise UnsupportedEngine(f"the model has none of the modules {', '.join(spec.targets)}")
    names = [engine_name(number) for number in range(spec.slots)]
    given = [_load(manager, parts, spec, name, seed) for seed, name in enumerate(names, 1)]
    try:
        manager.fetch_new_loras(set(names))
    except (AssertionError, KeyError, ValueError, RuntimeError) as error:
        raise UnsupportedEngine(f"SGLang takes no such adapters into its pool: {error}") from error
    live = [
        {
            name: tensor
            for part in parts
            for name, tensor in _placed(manager, part, bits, manager.memory_pool.get_buffer_id(own))
        }
        for own, bits in zip(names, given, strict=True)
    ]
    measured = BaseDigest(lambda: digest_live(base))
    for own, tensors in zip(names, live, strict=True):
        _check_rest(manager, tensors, manager.memory_pool.get_buffer_id(own))
        for tensor in tensors.values():
            zero(tensor)
        adapter = manager.loras[own]
        for layer in adapter.layers:
            layer.weights.clear()  # the slot is pinned: nothing is loaded from here again
        tensors[SCALE] = scale_tensor(partial(setattr, adapter, "scaling"))
        tensors[BASE] = measured
    return AdapterPool(tuple(live), _slot_bytes(manager))


def _slot_bytes(manager: Any) -> int:  # noqa: ANN401  # SGLang's
    """Memory of one slot, in all buffers of the pool."""
    pool = manager.memory_pool
    return sum(
        layer[0].numel() * layer.element_size()
        for buffers in (pool.A_buffer, pool.B_buffer)
        for layers in buffers.values()
        for layer in layers
    )


class _Wrapped:
    """A model whose modules SGLang has wrapped for adapters, for its own loader.

    Args:
        model: it.
        named: its parameters under the names from before.
    """

    def __init__(self, model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> None:
        self._model, self._named = model, named

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:  # noqa: ANN401
        """As the model, which looks its parameters up by name."""
        vars(self._model)["named_parameters"] = lambda *_, **__: iter(self._named.items())
        try:
            return self._model.load_weights(weights)  # type: ignore[operator]
        finally:
            del vars(self._model)["named_parameters"]


def _base(model: torch.nn.Module, path: Path, folder: Path) -> dict[str, LiveTensor]:
    named = {name.replace(_WRAPPED, "."): one for name, one in model.named_parameters()}
    checkpoint = read_checkpoint(path)
    wrapped = _Wrapped(model, named)
    boxes = layout.derive(wrapped, named, checkpoint, folder / "layout.base", "adapter")
    layout.check_placed(boxes)
    return parameters.live_tensors(named, checkpoint, boxes)


class _Part(NamedTuple):
    """A module of the model inside one of the engine's.

    Attributes:
        name: of the model's module.
        layer, stack: layer, and the engine's kind of module.
        number: which of the stack.
        first, rows: of its rows among those of the stack's output.
    """

    name: str
    layer: int
    stack: str
    number: int
    first: int
    rows: int


def _parts(manager: Any, spec: AdapterSpec) -> Iterator[_Part]:  # noqa: ANN401
    for number, modules in enumerate(manager.lora_modules):
        for path, module in modules.items():
            parent, _, stack = path.rpartition(".")
            known = STACKS.get(stack)
            if known is None:
                raise UnsupportedEngine(f"adapters on {path!r} are not supported")
            first = 0
            for place, (name, rows) in enumerate(zip(known, _rows(module, stack), strict=True)):
                if name in spec.targets:
                    yield _Part(f"{parent}.{name}", number, stack, place, first, rows)
                first += rows


def _rows(module: Any, stack: str) -> list[int]:  # noqa: ANN401
    """Outputs of the model's modules in a stack."""
    base = module.base_layer
    if stack == "qkv_proj":
        return [base.q_proj_shard_size, base.kv_proj_shard_size, base.kv_proj_shard_size]
    whole = int(base.weight.shape[0])
    return [whole // len(STACKS[stack])] * len(STACKS[stack])


def _load(
    manager: Any,  # noqa: ANN401  # SGLang's
    parts: Sequence[_Part],
    spec: AdapterSpec,
    own: str,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Have SGLang load an adapter of random bits under this name; the bits by tensor."""
    from sglang.srt.lora.lora_registry import LoRARef  # noqa: PLC0415  # only inside engines

    draw = torch.Generator().manual_seed(seed)
    pool, given = manager.memory_pool, dict[str, torch.Tensor]()
    for part in parts:
        inner = int(pool.A_buffer[part.stack][part.layer].shape[-1])
        shapes = {"A": (spec.rank, inner), "B": (part.rows, spec.rank)}
        for side, shape in shapes.items():
            random = torch.randn(*shape, generator=draw).to(manager.dtype)
            given[tensor_name(part.name, side)] = random
    settings = {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.rank,
        "target_modules": list(spec.targets),
    }
    reference = LoRARef(lora_id=own, lora_name=own, lora_path=own, pinned=True)
    answer = manager.load_lora_adapter_from_tensors(reference, dict(given), settings)
    if not answer.success:
        raise UnsupportedEngine(f"SGLang loads no such adapter: {answer.error_message}")
    return given


def _placed(
    manager: Any,  # noqa: ANN401  # SGLang's
    part: _Part,
    given: Mapping[str, torch.Tensor],
    slot: int,
) -> Iterator[tuple[str, LiveTensor]]:
    """The two matrices of a module in a slot, proved by the bits that were loaded."""
    for side, buffers in (("A", manager.memory_pool.A_buffer), ("B", manager.memory_pool.B_buffer)):
        name = tensor_name(part.name, side)
        whole, tensor = buffers[part.stack][part.layer], given[name]
        if whole.dim() != 3 or not whole.is_contiguous() or whole.dtype != tensor.dtype:
            raise UnsupportedEngine(f"SGLang keeps {name!r} in another way than others")
        rows = tensor.shape[0] * part.number if side == "A" else part.first
        first = slot * whole[0].numel() + rows * tensor.shape[1]
        flat = parameters.flat_of(name, whole)[first : first + tensor.numel()]
        shape, dtype_name = tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype]
        live = parameters.storage(name, dtype_name, shape, flat)
        if not np.array_equal(live.all_bits(), _bits(tensor)):
            raise UnsupportedEngine(f"SGLang does not keep {name!r} where it should be")
        yield name, live


def _check_rest(manager: Any, live: Mapping[str, LiveTensor], slot: int) -> None:  # noqa: ANN401
    """What the slot holds besides the adapter's tensors must be zero."""
    found = 0
    for buffers in (manager.memory_pool.A_buffer, manager.memory_pool.B_buffer):
        for layers in buffers.values():
            found += sum(int(torch.count_nonzero(layer[slot])) for layer in layers)
    ours = sum(int(np.count_nonzero(tensor.all_bits())) for tensor in live.values())
    if found != ours:
        raise UnsupportedEngine(f"SGLang's slot holds {found} elements of an adapter of {ours}")


def _bits(tensor: torch.Tensor) -> np.ndarray:
    flat = parameters.flat_of("given", tensor).numpy()
    return flat.view(f"u{flat.itemsize}")
