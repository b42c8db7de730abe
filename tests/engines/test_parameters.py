"""Where checkpoint tensors lie inside a model: proposed by name, proved by bytes."""

import numpy as np
import pytest
import torch

from rose_engines.errors import UnsupportedEngine
from rose_engines.safetensors import StoredTensor
from rose_engines.sglang.parameters import DeviceTensor, live_tensors

LAYER = "model.layers.0."


def checkpoint() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        f"{LAYER}self_attn.q_proj.weight": (8, 4),
        f"{LAYER}self_attn.k_proj.weight": (4, 4),
        f"{LAYER}self_attn.v_proj.weight": (4, 4),
        f"{LAYER}self_attn.q_proj.bias": (8,),
        f"{LAYER}self_attn.k_proj.bias": (4,),
        f"{LAYER}self_attn.v_proj.bias": (4,),
        f"{LAYER}mlp.gate_proj.weight": (6, 4),
        f"{LAYER}mlp.up_proj.weight": (6, 4),
        "model.norm.weight": (4,),
    }
    return {
        name: torch.randn(*shape, generator=draw).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    return {
        name: (
            "BF16",
            tuple(tensor.shape),
            tensor.contiguous().view(torch.int16).numpy().view(np.uint16).ravel(),
        )
        for name, tensor in tensors.items()
    }


def engine(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What SGLang makes of it at one rank: fused, and the vocabulary padded."""
    attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
    embedding = tensors["model.embed_tokens.weight"]
    made = {
        "model.embed_tokens.weight": torch.cat([embedding, torch.zeros(6, 4, dtype=torch.bfloat16)])
    }
    for leaf in ("weight", "bias"):
        parts = [tensors[f"{attention}{part}_proj.{leaf}"] for part in "qkv"]
        made[f"{attention}qkv_proj.{leaf}"] = torch.cat(parts)
    made[f"{mlp}gate_up_proj.weight"] = torch.cat(
        [tensors[f"{mlp}gate_proj.weight"], tensors[f"{mlp}up_proj.weight"]]
    )
    made["model.norm.weight"] = tensors["model.norm.weight"].clone()
    return made


def test_writes_reach_the_fused_parameter() -> None:
    tensors = checkpoint()
    parameters = engine(tensors)
    live = live_tensors(parameters, stored(tensors))
    assert live.keys() == tensors.keys()
    key = live[f"{LAYER}self_attn.k_proj.weight"]
    new = (np.arange(16) + 5).astype(np.uint16)
    key.put(slice(0, 16), new)
    row = parameters[f"{LAYER}self_attn.qkv_proj.weight"][8:12].contiguous()
    assert np.array_equal(row.view(torch.int16).numpy().view(np.uint16).ravel(), new)
    where = np.array([3, 9])
    key.put(where, np.array([1, 2], np.uint16))
    assert list(key.take(where)) == [1, 2]
    query = live[f"{LAYER}self_attn.q_proj.weight"]
    assert np.array_equal(query.all_bits(), stored(tensors)[f"{LAYER}self_attn.q_proj.weight"][2])


def test_tied_embedding_is_one_tensor() -> None:
    tensors = checkpoint()
    live = live_tensors(engine(tensors), stored(tensors))
    assert "lm_head.weight" not in live


def test_repacked_layout_is_refused_by_name() -> None:
    tensors = checkpoint()
    parameters = engine(tensors)
    name = f"{LAYER}self_attn.qkv_proj.weight"
    parameters[name] = parameters[name].flip(0).contiguous()
    with pytest.raises(UnsupportedEngine, match=r"q_proj\.weight.*repacked"):
        live_tensors(parameters, stored(tensors))


def test_parameter_from_nowhere_is_refused_by_name() -> None:
    tensors = checkpoint()
    parameters = engine(tensors) | {"model.scale": torch.ones(3)}
    with pytest.raises(UnsupportedEngine, match=r"model\.scale"):
        live_tensors(parameters, stored(tensors))


def test_padding_must_be_zero() -> None:
    tensors = checkpoint()
    parameters = engine(tensors)
    parameters["model.embed_tokens.weight"][12, 0] = 1.0
    with pytest.raises(UnsupportedEngine, match="more than the checkpoint"):
        live_tensors(parameters, stored(tensors))


@pytest.mark.parametrize(
    "extra", ["model.layers.0.mlp.experts.3.down_proj.weight", "rotary.inv_freq"]
)
def test_tensor_without_a_place_is_refused_by_name(extra: str) -> None:
    tensors = checkpoint()
    parameters = engine(tensors)
    with pytest.raises(UnsupportedEngine, match=extra):
        live_tensors(parameters, stored(tensors | {extra: torch.zeros(2).to(torch.bfloat16)}))


def test_half_a_fused_parameter_is_refused() -> None:
    tensors = checkpoint()
    parameters = engine(tensors)
    del tensors[f"{LAYER}mlp.up_proj.weight"]
    with pytest.raises(UnsupportedEngine, match="gate_proj"):
        live_tensors(parameters, stored(tensors))


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, np.uint16), (torch.float32, np.uint32)]
)
def test_device_tensor_moves_bits(dtype: torch.dtype, bits: type[np.generic]) -> None:
    """The accelerator's path, on a CPU tensor: same calls, same bits."""
    data = torch.arange(8).to(dtype)
    signed = torch.int16 if dtype is torch.bfloat16 else torch.int32
    tensor = DeviceTensor("t", "BF16", (8,), data.view(signed))
    new = np.array([60000, 7], bits)
    tensor.put(np.array([2, 5]), new)
    assert tensor.take(np.array([2, 5])).dtype == bits
    assert list(tensor.take(np.array([2, 5]))) == [60000, 7]
    tensor.put(slice(0, 2), np.array([1, 2], bits))
    assert list(tensor.all_bits()[:3]) == [1, 2, 60000]
