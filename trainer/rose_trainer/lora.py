"""A PEFT LoRA adapter as tensors that a ``Publisher`` publishes: megabytes instead of a model.

    adapter = Adapter(Path("/models/qwen3-8b"))
    publisher.publish(step, adapter.tensors(model))      # a PeftModel, or a folder that PEFT saved

PEFT itself reads configuration and weights; nothing here knows its files. Whatever the engines
would compute otherwise than PEFT is refused by name, before anything is published: settings of
``LoraConfig`` beyond rank, factor and modules, an adapter that is merged, and a base whose weights
are not those of the folder that the engines load (which PiSSA and its like change at the start).
The factor, also rsLoRA's, travels with each version. Next step: ``rose_trainer.publisher``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rose_core.adapters import BASE, SCALE, TARGETS
from rose_core.delta.digest import Digest
from rose_trainer.errors import BadState
from rose_weights.checkpoint import Checkpoint, digest_of

__all__ = ["Adapter"]

# Of LoraConfig: what is carried over, and what says nothing about what is computed.
_CARRIED = {"r", "lora_alpha", "use_rslora", "target_modules", "init_lora_weights"}
_SILENT = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "exclude_modules", "layers_pattern", "megatron_core",
    "megatron_config", "runtime_config", "qalora_group_size", "loftq_config", "eva_config",
    "velora_config", "ensure_weight_tying",
}  # fmt: skip
# Those that leave the base as it was.
_STARTS = {True, False, "gaussian", "eva", "orthogonal"}
_NAME = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_[AB]\.weight$")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Adapter:
    """An adapter over one base.

    Args:
        base: folder of the model that the engines load (safetensors).
        dtype: the engines' element type.

    Raises:
        rose_weights.errors.Damaged: the folder holds no such model.
    """

    def __init__(self, base: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._folder = base
        self._checkpoint = Checkpoint(base)
        self._base: Digest = digest_of(self._checkpoint)
        self._dtype = dtype
        self._compared: int | None = None

    def tensors(self, source: Any, name: str = "default") -> dict[str, torch.Tensor]:  # noqa: ANN401
        """The adapter as it is now, under PEFT's names, with its factor and its base's digest.

        Args:
            source: a ``peft.PeftModel``, or the folder that its ``save_pretrained`` wrote.
            name: which of the model's adapters.

        Raises:
            BadState: the engines would compute something else; says what, and what to do.
        """
        config, found = self._read(source, name)
        _check_config(config)
        modules = _check_names(found)
        for key, tensor in found.items():
            if config.r not in tensor.shape[:: 1 if ".lora_A." in key else -1][:1]:
                raise BadState(f"{key} is {list(tensor.shape)}, which is not of rank {config.r}")
        if not modules:
            raise BadState("the adapter has no tensors; has it been unloaded?")
        state = {key: found[key].detach().to(self._dtype).contiguous() for key in sorted(found)}
        scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
        words = np.array([self._base.low, self._base.high], "<u8").view("<i8")
        return {
            **state,
            SCALE: torch.tensor([scale], dtype=torch.float64),
            BASE: torch.from_numpy(words),
        }

    def _read(self, source: Any, name: str) -> tuple[Any, Mapping[str, torch.Tensor]]:  # noqa: ANN401
        import peft  # noqa: PLC0415  # the trainer's, and only where adapters are trained

        if isinstance(source, str | Path):
            try:
                config = peft.PeftConfig.from_pretrained(str(source))
                return config, peft.load_peft_weights(str(source), device="cpu")
            except (OSError, ValueError, TypeError) as error:
                raise BadState(f"PEFT reads no adapter in {source}: {error}") from error
        if name not in source.peft_config:
            raise BadState(f"the model has no adapter {name!r}: it has {list(source.peft_config)}")
        _check_unmerged(source)
        if self._compared != id(source):
            self._compare(source)
            self._compared = id(source)
        return source.peft_config[name], peft.get_peft_model_state_dict(source, adapter_name=name)

    def _compare(self, model: torch.nn.Module) -> None:
        """The live base must be the folder's; once per model, since nobody trains it."""
        live = dict(_base_of(model))
        for name in self._checkpoint.names():
            tensor = live.get(name)
            dtype = _DTYPES.get(self._checkpoint.dtype(name))
            if tensor is None or dtype is None:
                if name == "lm_head.weight":
                    continue  # tied
                raise BadState(f"the model has no {name!r} of {self._folder} to compare with")
            bits = torch.from_numpy(self._checkpoint.bits(name).copy().view(np.uint8))
            wanted = bits.view(dtype).view(self._checkpoint.shape(name))
            if not torch.equal(tensor.detach().to("cpu", dtype), wanted):
                raise BadState(
                    f"{name!r} of the model is not that of {self._folder}: engines would add the "
                    "adapter to other weights. PiSSA and its like change the base at the start, "
                    "and so does a merge; train over the folder's own weights"
                )


def _base_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that are no adapter's, under the names of the model without one."""
    for name, tensor in model.named_parameters():
        if ".lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor


def _check_config(config: Any) -> None:  # noqa: ANN401  # PEFT's
    import peft  # noqa: PLC0415  # as above

    if not isinstance(config, peft.LoraConfig):
        raise BadState(f"engines run LoRA adapters, not {type(config).__name__}")
    if config.init_lora_weights not in _STARTS:
        raise BadState(
            f"init_lora_weights={config.init_lora_weights!r} changes the base at the start or may: "
            f"engines load the unchanged one. Use one of {sorted(map(str, _STARTS))}"
        )
    plain = peft.LoraConfig()
    for field in dataclasses.fields(config):
        if field.name in _CARRIED | _SILENT:
            continue
        value, usual = getattr(config, field.name), getattr(plain, field.name, None)
        if value != usual and value:
            raise BadState(
                f"{field.name}={value!r} of the adapter is not what engines compute: they run "
                "rank, factor and modules of LoraConfig alone. Leave it out"
            )


def _check_unmerged(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            raise BadState(
                f"the adapter is merged into {path!r}: engines would add it twice. Call "
                "unmerge_adapter() before publishing"
            )


def _check_names(found: Mapping[str, torch.Tensor]) -> set[str]:
    """Modules that have a pair of matrices, by path.

    Raises:
        BadState: a tensor that is no such matrix, or one of a module that engines do not adapt.
    """
    modules = set()
    for key in found:
        known = _NAME.match(key)
        if known is None:
            raise BadState(f"{key!r} is no matrix of LoRA: engines would not compute with it")
        module = known["module"]
        if module.rpartition(".")[2] not in TARGETS or ".experts." in module:
            raise BadState(f"engines adapt {', '.join(TARGETS)}; the adapter changes {module!r}")
        modules.add(module)
    return modules
