"""Architectures that the atlas examines besides ``tests/engines/model_shapes.py``.

Those have sizes that other tests compare with SGLang's; here are more models with latent attention
(MLA). Whatever is not named is as the class of transformers has it.
"""

from __future__ import annotations

from typing import Any

from tests.engines.model_shapes import SHAPES as SIZED


def _latent(name: str, kind: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "architectures": [name],
        "model_type": kind,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 128000,
        "max_position_embeddings": 32768,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **more,
    }


_EXPERTS = {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}

LATENT: dict[str, dict[str, Any]] = {
    "glm4-moe-lite": _latent(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", first_k_dense_replace=1, **_EXPERTS
    ),
    "longcat-flash": _latent(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        num_layers=28,
        ffn_hidden_size=12288,
        n_routed_experts=64,
        zero_expert_num=8,
        moe_topk=4,
        expert_ffn_hidden_size=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    ),
    "minicpm3": _latent("MiniCPM3ForCausalLM", "minicpm3", tie_word_embeddings=False),
    "kimi-linear": _latent(
        "KimiLinearForCausalLM",
        "kimi_linear",
        num_local_experts=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
    ),
}

SHAPES: dict[str, dict[str, Any]] = {**SIZED, **LATENT}
