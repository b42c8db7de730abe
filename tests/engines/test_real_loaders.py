"""Layouts derived from SGLang's own loaders: Qwen3, Llama, Qwen3-MoE and FP8, over two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rose_core.delta.digest import Digest, digest_run, total
from rose_dev.engine_testing import ended_well, start_beside_engines
from rose_dev.models import RECIPES, Recipe, config, tensors
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.parts import check_parts
from rose_wire.ports import free_port

pytestmark = pytest.mark.engine

TINY = RECIPES["tiny"]
EXPERTS, INNER = 4, 64
CHILD = Path(__file__).with_name("loader_process.py")
Tensors = dict[str, torch.Tensor]


def llama() -> tuple[dict[str, Any], Tensors]:
    """As Qwen3, without norms of queries and keys."""
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    made = {n: one for n, one in tensors(TINY).items() if "q_norm" not in n and "k_norm" not in n}
    return config(TINY) | kind, made


def experts(
    recipe: Recipe = TINY, inner: int = INNER, spread: float = 1.0
) -> tuple[dict[str, Any], Tensors]:
    """Every layer's MLP is a router and a stack of experts.

    Args:
        recipe: of all else.
        inner: width of an expert.
        spread: of its weights.
    """
    draw = torch.Generator().manual_seed(5 + recipe.seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * spread).to(torch.bfloat16)

    made = {name: one for name, one in tensors(recipe).items() if ".mlp." not in name}
    for number in range(recipe.layers):
        mlp = f"model.layers.{number}.mlp."
        made[f"{mlp}gate.weight"] = normal(EXPERTS, recipe.hidden)
        for expert in range(EXPERTS):
            made[f"{mlp}experts.{expert}.gate_proj.weight"] = normal(inner, recipe.hidden)
            made[f"{mlp}experts.{expert}.up_proj.weight"] = normal(inner, recipe.hidden)
            made[f"{mlp}experts.{expert}.down_proj.weight"] = normal(recipe.hidden, inner)
    kind = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    }
    return config(recipe) | kind, made


def fp8() -> tuple[dict[str, Any], Tensors]:
    """Linear layers as e4m3 with one FP32 scale per block of 32 x 32."""
    draw = torch.Generator().manual_seed(6)
    made: Tensors = {}
    for name, one in tensors(TINY).items():
        if "_proj." not in name:
            made[name] = one
            continue
        made[name] = torch.randn(one.shape, generator=draw).to(torch.float8_e4m3fn)
        blocks = (one.shape[0] // 32, one.shape[1] // 32)
        made[f"{name}_scale_inv"] = torch.rand(blocks, generator=draw) + 0.5
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
    }
    return config(TINY) | {"quantization_config": method}, made


MODELS = {
    "qwen3": lambda: (config(TINY), tensors(TINY)),
    "tied": lambda: (config(RECIPES["tiny-tied"]), tensors(RECIPES["tiny-tied"])),
    "llama": llama,
    "experts": experts,
    "fp8": fp8,
}


def write(folder: Path, settings: dict[str, Any], made: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: one.contiguous() for name, one in made.items()}, folder / "m.safetensors")
    return folder


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Model -> what each of two ranks says."""
    root = tmp_path_factory.mktemp("loaders")
    folders = [write(root / name, *make()) for name, make in MODELS.items()]
    port = str(free_port())
    outs = [root / f"{rank}.json" for rank in range(2)]
    models = list(map(str, folders))
    children = {
        log: start_beside_engines(CHILD, [str(rank), "2", port, str(out), *models], log, ranks=2)
        for rank, out in enumerate(outs)
        for log in [out.with_suffix(".log")]
    }
    ended_well(children, 400)
    found = [json.loads(out.read_bytes()) for out in outs]
    return {
        folder.name: [rank[number] for rank in found] for number, folder in enumerate(folders)
    } | {"root": [{"root": str(root)}]}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_ranks_parts_make_up_the_checkpoint(
    reports: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """Every element is held, and digests of distinct parts add up to the checkpoint's."""
    reported = reports[name]
    assert [one.get("refused") for one in reported] == [None, None]
    checkpoint = read_checkpoint(Path(reports["root"][0]["root"]) / name)
    parts = [{n: _part(p) for n, p in one["parts"].items()} for one in reported]
    check_parts(parts, {n: stored[2].size for n, stored in checkpoint.items()})
    for tensor, (_, _, bits) in checkpoint.items():
        held = {parts[rank][tensor]: reported[rank]["digests"][tensor] for rank in range(2)}
        found = total(Digest.parse(digest) for digest in held.values())
        assert found == digest_run(tensor, 0, bits), tensor


def _part(boxes: list[list[int]]) -> tuple[tuple[int, int, int, int], ...]:
    return tuple((a, b, c, d) for a, b, c, d in boxes)


def test_fused_stacked_and_split_tensors_are_where_the_loader_puts_them(
    reports: dict[str, list[dict[str, Any]]],
) -> None:
    places = reports["experts"][0]["parameters"]
    layer_0 = "model.layers.0."
    assert places[f"{layer_0}self_attn.k_proj.weight"] == [f"{layer_0}self_attn.qkv_proj.weight"]
    for part, stack in (("gate", "w13"), ("up", "w13"), ("down", "w2")):
        for expert in range(EXPERTS):
            name = f"{layer_0}mlp.experts.{expert}.{part}_proj.weight"
            assert places[name] == [f"{layer_0}mlp.experts.{stack}_weight"]
    scales = reports["fp8"][1]["parameters"]
    name = f"{layer_0}mlp.up_proj.weight_scale_inv"
    assert scales[name] == [f"{layer_0}mlp.gate_up_proj.weight_scale_inv"]
    assert "lm_head.weight" not in reports["tied"][0]["parameters"]
    # o_proj is split along its columns: a box per rank, in rows half as long as the tensor's.
    (box,) = reports["llama"][1]["parts"][f"{layer_0}self_attn.o_proj.weight"]
    assert box == [64, 128, 64, 128]
