"""Adapters of PEFT over a tiny base, and what engines and PEFT's merged models say of a prompt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from rose_core.adapters import TARGETS
from rose_core.delta.safetensors import StoredTensor
from rose_dev.engine_testing import RealEngine, State
from rose_dev.models import make_named
from rose_trainer.lora import Adapter

RANK = 4
_WORDS = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


def make_base(into: Path) -> Path:
    """The tiny model with 32 bits a weight, so that merging rounds nothing that is seen."""
    import transformers  # noqa: PLC0415  # two seconds, which each worker of a lane would spend

    bits16, found = make_named("tiny"), into / "tiny32"
    model = transformers.AutoModelForCausalLM.from_pretrained(bits16, dtype=torch.float32)
    shutil.copytree(bits16, found)
    model.save_pretrained(found)
    return found


def trained(folder: Path, seed: int, **settings: Any) -> Any:  # noqa: ANN401  # of PEFT
    """A model of PEFT whose adapter is not nothing."""
    import peft  # noqa: PLC0415  # as slow
    import transformers  # noqa: PLC0415

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=list(TARGETS), **settings)
    model = peft.get_peft_model(base, config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1, generator=draw)
    return model.eval()


def state(adapter: Adapter, model: Any) -> State:  # noqa: ANN401  # of PEFT
    """The adapter as a version's tensors."""
    return {
        name: StoredTensor(
            _WORDS[tensor.dtype],
            tuple(tensor.shape),
            tensor.numpy().view(f"u{tensor.element_size()}").ravel(),
        )
        for name, tensor in adapter.tensors(model).items()
    }


def logprobs(model: Any, tokens: list[int]) -> np.ndarray:  # noqa: ANN401  # of transformers
    """Of every token after the first, by PEFT's own model with its adapter merged into it."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    chosen = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    return np.asarray(chosen.numpy())


async def logprobs_of(engine: RealEngine, tokens: list[int], key: str = "") -> np.ndarray:
    """The same, as the engine says; ``key`` names the version that is meant."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        **({"extra_key": key} if key else {}),
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client,
        client.post(f"{engine.url}/generate", json=body) as reply,
    ):
        answer = await reply.json()
    return np.array([one[0] for one in answer["meta_info"]["input_token_logprobs"][1:]])
