"""One rank of SGLang's own loader, run by the engine's Python; no server and no turn.

Makes each model with the engine's layers, has its loader load the checkpoint, derives the layout
from that loader and proves it, as the plugin does; then reports which part of every tensor lies
here and the digest of that part. Usage: RANK RANKS PORT REPORT MODEL...
"""

# SGLang reads its environment while it is imported, and is not installed where this is checked.
# ruff: noqa: PLC0415, ANN401

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import msgspec
import torch

from rose_engines.errors import UnsupportedEngine
from rose_engines.sglang import ranks
from rose_engines.tensors import layout, parameters
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.parts import parts_of


def prepare(model: str, rank: int, size: int, port: int) -> None:
    """Process groups and settings of SGLang, as its own one-batch benchmark sets them up."""
    from sglang.srt.distributed.device_communicators import pynccl

    pynccl.PyNcclCommunicator = ranks.NoCommunicator
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import prepare_server_args

    arguments = ["--model-path", model, "--device", "cpu", "--tp-size", str(size)]
    server = prepare_server_args([*arguments, "--attention-backend", "torch_native"])
    world = one_batch.spawn_world_rank(server, tp_rank=rank, pp_rank=0)
    spawned = one_batch.SpawnRanks(world_rank=world, gpu_id=rank)
    one_batch.publish(server, role="scheduler", ranks=spawned)
    one_batch._init_process_global_configs()
    one_batch.bootstrap.init_parallel_runtime(server_args=server, device="cpu", dist_port=port)
    one_batch.bootstrap.init_layer_runtime(model_config=_config(model))


def _config(folder: str) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(model_path=folder, dtype="bfloat16")


def load(folder: str) -> torch.nn.Module:
    """The model with the checkpoint in it, before anything is done to the loaded weights."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.weight_utils import get_quant_config

    config, loading = _config(folder), LoadConfig()
    quantised = getattr(config.hf_config, "quantization_config", None)
    quant = get_quant_config(config, loading, {}) if quantised else None
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: torch.nn.Module = loader._initialize_model(config, loading, quant)
    finally:
        torch.set_default_dtype(torch.float32)
    checkpoint = read_checkpoint(Path(folder))
    with torch.no_grad():
        model.load_weights(  # type: ignore[operator]
            (name, layout._tensor(*stored)) for name, stored in checkpoint.items()
        )
    return model


def twin(folder: str) -> Any:
    """Another instance of the model, on ``meta``."""
    from sglang.srt.configs.load_config import LoadConfig

    return ranks.twin_of(_config(folder), LoadConfig())


def report(folder: str, size: int) -> dict[str, Any]:
    """Parts and digests of one model on this rank, or why it is refused."""
    checkpoint = read_checkpoint(Path(folder))
    try:
        model = load(folder)
        named = dict(model.named_parameters())
        found = layout.find(model, named, checkpoint)  # type: ignore[arg-type]
        live = parameters.live_tensors(named, checkpoint, found.boxes, computed=found.computed)
    except UnsupportedEngine as refused:
        return {"refused": str(refused)}
    return {
        "parts": parts_of(live),
        "digests": {name: str(tensor.digest()) for name, tensor in live.items()},
        "parameters": {
            name: sorted({box.parameter for box in boxes}) for name, boxes in found.boxes.items()
        },
        "ranks": size,
    }


def main(rank: int, size: int, port: int, out: Path, models: list[str]) -> None:
    """Report on every model."""
    prepare(models[0], rank, size, port)
    out.write_bytes(msgspec.json.encode([report(folder, size) for folder in models]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
