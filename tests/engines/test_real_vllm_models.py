"""Models in a real vLLM: they take commits in place and stay exact, or are refused at the start."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rose_core.identity import WeightVersion
from rose_core.wire.sync import EngineSpec
from rose_dev.engine_testing import State, write_bundle
from rose_dev.models import RECIPES, make_model
from rose_dev.vllm_testing import start_vllm
from rose_engines.process.client import TurnClient
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.control import ControlClient
from tests.engines.model_shapes import SHAPES
from tests.engines.test_real_engine import nudged
from tests.engines.test_real_loaders import experts, write

pytestmark = pytest.mark.vllm

TIED = RECIPES["tiny-tied"]
FIRST, SECOND = (WeightVersion("models", 1, number) for number in range(2))


def with_tokenizer(folder: Path) -> Path:
    """With a tokenizer: vLLM does not start without one."""
    for path in make_model(TIED).iterdir():
        if path.name.startswith(("tokenizer", "special")):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


async def test_a_commit_is_what_a_fresh_load_would_be(tmp_path: Path) -> None:
    """After the commit the engine says of a prompt what one says that was started from there.

    The output matrix of this model is its embedding matrix, in vLLM one parameter.
    """
    model = make_model(TIED)
    old: State = {
        key: one._replace(bits=one.bits.copy()) for key, one in read_checkpoint(model).items()
    }
    new, prompt = nudged(old, 0.1), [104, 101, 7, 250, 33, 9]
    manifest = write_bundle(tmp_path / "b", SECOND, new, (FIRST, old))
    with start_vllm(tmp_path, model, version=str(FIRST)) as engine:
        async with (
            TurnClient(engine.url) as client,
            await ControlClient.connect(engine.control) as control,
        ):
            assert (await control.status()).digest == manifest.base_digest
            await control.stage(tmp_path / "b")
            assert (await control.commit(str(SECOND))).digest == manifest.digest
            await control.export(tmp_path / "model.safetensors")
            by, result = await client.prompt_logprobs(prompt)
    assert by == str(SECOND)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").rename(fresh / "model.safetensors")
    found = read_checkpoint(with_tokenizer(fresh))
    assert all(np.array_equal(found[key][2], new[key][2]) for key in new)
    again = tmp_path / "again"
    again.mkdir()
    with start_vllm(again, fresh, version=str(SECOND)) as engine:
        async with TurnClient(engine.url) as client:
            assert (await client.prompt_logprobs(prompt))[1] == result


def latent(folder: Path) -> Path:
    """A small DeepSeek V2: vLLM rearranges a matrix of its latent attention after loading."""
    shape = SHAPES["deepseek-v2-lite"] | {
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "vocab_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    }
    kind = str(shape.pop("model_type"))
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, **shape)
    made = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
    made.to(torch.bfloat16).save_pretrained(folder)
    return with_tokenizer(folder)


def mixture(folder: Path) -> Path:
    """A small Qwen 3 with experts, whose matrices vLLM repacks on CPU."""
    return with_tokenizer(write(folder, *experts()))


@pytest.mark.parametrize(
    ("make", "tensor"),
    [
        (latent, r"kv_b_proj\.weight"),
        (mixture, r"experts[^']*w13_weight"),
    ],
)
def test_a_model_that_would_not_stay_exact_is_refused_by_name_and_its_engine_ends(
    tmp_path: Path, make: Callable[[Path], Path], tensor: str
) -> None:
    model = make(tmp_path / "model")
    # Latent attention has blocks of another size on CPU: a longer context would not fit.
    spec = EngineSpec("test", model.name, context_tokens=512, kv_tokens=8192, max_running=4)
    with (
        pytest.raises(pytest.fail.Exception, match="engine ended"),
        start_vllm(tmp_path, model, spec),
    ):
        pass
    log = (tmp_path / "engine.log").read_text()
    # On a CPU with AMX vLLM has thrown the matrix of latent attention away by then.
    why = r"(the engine's loader computes what it copies into|vLLM has packed)"
    assert re.search(rf"rose: refused: {why} '[^']*{tensor}'", log), log[-3000:]
