"""What SGLang itself makes of model configurations and of GPUs, run by the engine's Python.

Every model is built with SGLang's layers on torch's ``meta`` device, which allocates nothing, so
that whole models fit anywhere; its caches are sized by SGLang's own configurator. The tensors that
a checkpoint of the model has come from transformers' class of it, on ``meta`` too.
Of several ranks each is a process that answers for itself.
Usage: RANK RANKS PORT QUESTIONS ANSWERS, both files of JSON (``test_real_sizes``).
"""

# SGLang reads its environment while it is imported, and is not installed where this is checked.
# ruff: noqa: PLC0415, ANN401

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines import loader_process

GIB = 1 << 30
_WORDS = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
}


_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def built(folder: str, ranks: int = 1) -> tuple[Any, torch.nn.Module]:
    """SGLang's description of a model, and the model without memory."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.weight_utils import get_quant_config

    config, loading = loader_process._config(folder), LoadConfig()
    quantised = getattr(config.hf_config, "quantization_config", None)
    quant = get_quant_config(config, loading, {}) if quantised else None
    # Its CPU backend wants head counts made even over ranks.
    adjust_tp_num_heads_if_necessary(config.hf_text_config, ranks, True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = loader._initialize_model(config, loading, quant)
    finally:
        torch.set_default_dtype(torch.float32)
    return config, model


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of every tensor that hangs on a module: parameters, buffers, tables, copies."""
    found: dict[int, int] = {}
    for module in model.modules():
        own = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        for tensor in own:
            if isinstance(tensor, torch.Tensor):
                found[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(found.values())


def checkpoint_of(folder: str) -> list[tuple[str, str, list[int]]]:
    """Name, type and shape of the tensors of a checkpoint of this model."""
    import transformers

    text = json.loads((Path(folder) / "config.json").read_bytes())
    name = text["architectures"][0]
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = None
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config, torch_dtype=torch.bfloat16)
    stored = []
    for key, tensor in model.state_dict().items():
        word, shape = _WORDS[tensor.dtype], list(tensor.shape)
        if "quantization_config" in text and key.endswith("_proj.weight"):
            # As published: a byte for each weight, a scale for each block of 128 by 128.
            blocks = [-(-length // 128) for length in shape]
            stored.append((f"{key}_scale_inv", "F32", blocks))
            word = "F8_E4M3"
        stored.append((key, word, shape))
    return stored


def configurator(config: Any, model: torch.nn.Module) -> Any:
    """SGLang's sizing of pools for this model, on a GPU that is not there."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    made = object.__new__(KVCacheConfigurator)
    layers = resolve_layer_indices(model=model, model_config=config, is_draft_worker=False)
    for name, value in {
        "device": "cuda",
        "gpu_id": 0,
        "attn_dp_size": 1,
        "pp_size": 1,
        "model": model,
        "model_config": config,
        "server_args": SimpleNamespace(enable_hisparse=False),
        "kv_cache_dtype": torch.bfloat16,
        "kv_cache_dtype_str": "auto",
        "model_dtype": torch.bfloat16,
        "page_size": 1,
        "sliding_window_size": getattr(model, "get_attention_sliding_window_size", lambda: None)(),
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "is_draft_worker": False,
        "post_capture_kv_active": False,
        "is_hybrid_swa": config.is_hybrid_swa,
        "use_mla_backend": config.attention_arch == AttentionArch.MLA,
        "layer_info": layers,
        "mambaish_config": mambaish_config(config),
        "hybrid_gdn_config": None,
        "hybrid_kda_config": None,
        "kv_shard_spec": None,
        "kv_shard_rank": None,
        "kv_shard_size": 1,
        "spec_aux_config": None,
        "extra_mamba_cache_bytes_per_req": 0,
    }.items():
        object.__setattr__(made, name, value)
    return made


def model_answer(folder: str, ranks: int) -> dict[str, Any]:
    """What one model takes."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    config, model = built(folder, ranks)
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()  # type: ignore[operator]  # makes MLA's copies of kv_b_proj
    made = configurator(config, model)
    states = made.mambaish_config
    return {
        "weights": held_bytes(model),
        "per_token": float(create_memory_pool_configurator(made)._cell_size),
        "state": states.mamba2_cache_params.mamba_cache_per_req if states is not None else 0,
        "checkpoint": checkpoint_of(folder),
    }


def pool_answer(made: Any, case: dict[str, Any]) -> dict[str, Any]:
    """The KV pool that SGLang builds on a GPU with so much free memory, or why it does not."""
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import kv_cache_configurator

    # Its collection before the measurement takes longer than all the rest, hundreds of times.
    kv_cache_configurator.gc = SimpleNamespace(collect=lambda: 0)
    kv_cache_configurator.get_available_gpu_memory = lambda *_a, **_k: case["free_after"] / GIB
    runtime_context.get_context().override("tests", **case["arguments"])
    try:
        found = copy.copy(made)._resolve_memory_pool_config(case["free_before"] / GIB)
    except (ValueError, RuntimeError) as refused:
        return {"refused": f"{type(refused).__name__}: {refused}"}
    return {"tokens": found.max_total_num_tokens, "running": found.max_running_requests}


def main(rank: int, ranks: int, port: int, questions: Path, answers: Path) -> None:
    """Answer every question."""
    asked = json.loads(questions.read_bytes())
    # Kernels of the CPU build that a model's file looks up while it is imported; none is called.
    for kernel in _KERNELS:
        torch.library.define(f"sgl_kernel::{kernel}", "(Tensor a) -> Tensor")
    from sglang.srt.models.registry import ModelRegistry, import_model_classes

    # Where SGLang was imported before this program, those models are missing that lacked a kernel.
    import_model_classes.cache_clear()
    ModelRegistry.register("sglang.srt.models", overwrite=True)
    # Some layers name the current GPU as the place of their parameters.
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    loader_process.prepare(asked["first"], rank, ranks, port)
    models = {}
    for folder in asked["models"]:
        try:
            models[folder] = model_answer(folder, ranks)
        except Exception as error:  # noqa: BLE001 - whatever SGLang refuses, the test names it
            models[folder] = {"refused": f"{type(error).__name__}: {error}"}
    pools = []
    for folder, cases in asked["pools"].items():
        made = configurator(*built(folder))
        pools += [pool_answer(made, case) for case in cases]
    answers.write_text(json.dumps({"models": models, "pools": pools}))


if __name__ == "__main__":
    rank, ranks, port = map(int, sys.argv[1:4])
    main(rank, ranks, port, Path(sys.argv[4]), Path(sys.argv[5]))
