"""PEFT's own adapters as tensors to publish, and what engines would compute otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose_core.adapters import BASE, SCALE, TARGETS
from rose_core.delta.digest import digest_run, total
from rose_dev.models import make_named
from rose_trainer.errors import BadState
from rose_trainer.lora import Adapter
from rose_weights.checkpoint import Checkpoint

pytestmark = [
    # PEFT asks transformers by a name that transformers calls old.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]


def libraries() -> tuple[Any, Any]:
    """PEFT and transformers: every worker collects this file, and one runs it."""
    import peft  # noqa: PLC0415  # with the parts of transformers that it imports four seconds
    import transformers  # noqa: PLC0415

    return peft, transformers


@pytest.fixture(scope="module")
def base() -> Path:
    return make_named("tiny")


def model(base: Path, **settings: Any) -> Any:  # noqa: ANN401  # of PEFT
    peft, transformers = libraries()
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    usual: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS)}
    return peft.get_peft_model(whole, peft.LoraConfig(**usual | settings))


def test_a_model_and_the_folder_that_peft_saves_of_it_are_the_same_tensors(
    base: Path, tmp_path: Path
) -> None:
    trained = model(base, init_lora_weights="gaussian", target_modules=["q_proj", "v_proj"])
    trained.save_pretrained(tmp_path)
    live, saved = Adapter(base).tensors(trained), Adapter(base).tensors(tmp_path)
    assert live.keys() == saved.keys()
    assert all(torch.equal(live[name], saved[name]) for name in live)
    names = [
        f"model.layers.{layer}.self_attn.{part}"
        for layer in (0, 1)
        for part in ("q_proj", "v_proj")
    ]
    wanted = {f"base_model.model.{name}.lora_{side}.weight" for name in names for side in "AB"}
    assert live.keys() == wanted | {SCALE, BASE}
    assert all(live[name].dtype == torch.bfloat16 for name in wanted)


def test_the_base_is_named_by_the_digest_that_engines_measure(base: Path) -> None:
    found = Checkpoint(base)
    digest = total(
        digest_run(name, 0, np.ascontiguousarray(found.bits(name))) for name in found.names()
    )
    words = Adapter(base).tensors(model(base))[BASE].numpy().view("<u8")
    assert [int(part) for part in words] == [digest.low, digest.high]


@pytest.mark.parametrize(("rslora", "factor"), [(False, 2.0), (True, 8 / math.sqrt(4))])
def test_the_factor_is_that_of_peft(base: Path, rslora: bool, factor: float) -> None:
    trained = model(base, use_rslora=rslora)
    layer = trained.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == factor
    assert Adapter(base).tensors(trained)[SCALE].tolist() == [factor]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' changes the base"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern=\{'q_proj': 2\}"),
        ({"alpha_pattern": {"q_proj": 2}}, r"alpha_pattern=\{'q_proj': 2\}"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "lm_head.base_layer.weight' is no matrix of LoRA",
        ),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\]"),
    ],
)
def test_what_engines_would_compute_otherwise_is_refused_by_name(
    base: Path, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    peft, transformers = libraries()
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    usual: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]}
    trained = peft.get_peft_model(whole, peft.LoraConfig(**usual | settings))
    trained.save_pretrained(str(tmp_path))
    with pytest.raises(BadState, match=why):
        Adapter(base).tensors(tmp_path)


def merge(trained: Any) -> None:  # noqa: ANN401  # of PEFT
    trained.merge_adapter()


def unload(trained: Any) -> None:  # noqa: ANN401  # of PEFT
    trained.delete_adapter("default")


def train_base(trained: Any) -> None:  # noqa: ANN401  # of PEFT
    with torch.no_grad():
        trained.base_model.model.model.norm.weight.add_(1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (merge, "the adapter is merged into .*q_proj'"),
        (unload, "the model has no adapter 'default'"),
        (train_base, "'model.norm.weight' of the model is not that of"),
    ],
)
def test_a_model_that_is_not_base_and_adapter_is_refused(
    base: Path, change: Callable[[Any], None], why: str
) -> None:
    trained = model(base)
    change(trained)
    with pytest.raises(BadState, match=why):
        Adapter(base).tensors(trained)


def test_a_merge_after_the_first_version_is_refused_until_it_is_undone(base: Path) -> None:
    trained, adapter = model(base), Adapter(base)
    before = adapter.tensors(trained)
    trained.merge_adapter()
    with pytest.raises(BadState, match="merged"):
        adapter.tensors(trained)
    trained.unmerge_adapter()
    assert all(torch.equal(one, before[name]) for name, one in adapter.tensors(trained).items())


def test_another_kind_of_adapter_and_no_adapter_are_refused(base: Path, tmp_path: Path) -> None:
    peft, transformers = libraries()
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    other = peft.get_peft_model(
        whole, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    with pytest.raises(BadState, match="not IA3Config"):
        Adapter(base).tensors(other)
    with pytest.raises(BadState, match="PEFT reads no adapter in"):
        Adapter(base).tensors(tmp_path)
