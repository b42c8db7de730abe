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

LAYERS = 4
# Widths that fit each other; whatever is not here stays as it was published.
_TINY = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 256,
    "num_experts": 4,
    "n_routed_experts": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "head_dim": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "q_lora_rank": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_ssm": 512,
    "mamba_d_state": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_head_dim": 64,
    "linear_num_heads": 4,
    "num_layers": 2,
    "ffn_hidden_size": 256,
    "expert_ffn_hidden_size": 128,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "dim_model_base": 64,
    "n_embd": 256,
    "d_model": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 256,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers_per_stack": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_positions": 256,
    "max_seq_len": 256,
    "rotary_dim": 32,
    "kv_channels": 64,
    "zaya_mlp_expansion": 64,
    "qk_head_dim": 96,
    "index_n_heads": 4,
    "o_lora_rank": 64,
    "o_groups": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_end_index": LAYERS - 1,
    "moe_shared_expert_intermediate_size": 128,
    "intermediate_size_mlp": 256,
    "num_heads": 8,
    "state_size": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "laurel_rank": 32,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 512,
    "vocab_offset": 512,
    "num_kv_shared_layers": 2,
    "max_window_layers": 2,
}


# What SGLang asks for beside what a class of transformers has by itself, at a tiny size.
_YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_FIRST_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_SPARSE = {"moe_layer_freq": 1, "topk_method": "noaux_tc"}
_ASKED: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": {"rope_scaling": _YARN, **_SPARSE},
    "Exaone4ForCausalLM": {"sliding_window_pattern": "LG"},
    "ExaoneMoeForCausalLM": {"is_moe_layer": [False, True, True, True], **_FIRST_DENSE},
    "Gemma4ForCausalLM": {"per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 64}}},
    "GlmMoeDsaForCausalLM": {"rope_scaling": _YARN, **_SPARSE},
    "HYV3ForCausalLM": {
        "route_norm": True,
        "qk_norm": True,
        "first_k_dense_replace": 1,
        **_FIRST_DENSE,
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 64, "use_qk_norm": True},
    "HunYuanMoEV1ForCausalLM": {
        "head_dim": 64,
        "use_qk_norm": True,
        "moe_intermediate_size": 256,
        "use_mixed_mlp_moe": False,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2ForCausalLM": {"intermediate_size": 512, "rms_norm": True},
    "MiMoV2FlashForCausalLM": {"hybrid_layer_pattern": [0, 1, 0, 1]},
    "MiniMaxM2ForCausalLM": {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
}


def asked(settings: dict[str, Any]) -> dict[str, Any]:
    """A tiny model's settings with what SGLang asks for too."""
    return settings | _ASKED.get(settings["architectures"][0], {})


def tiny(shape: dict[str, Any]) -> dict[str, Any]:
    """The same architecture, small: what is nested too, and a list with an entry per layer."""
    small = {
        key: tiny(value)
        if isinstance(value, dict)
        else _TINY[key]
        if value and key in _TINY
        else value
        for key, value in shape.items()
    }
    if shape.get("num_key_value_heads"):
        whole = shape["num_key_value_heads"] == shape.get("num_attention_heads")
        small["num_key_value_heads"] = 4 if whole else 2
    layers = shape.get("num_hidden_layers")
    for key, value in shape.items():
        if isinstance(value, list) and len(value) == layers and layers > LAYERS:
            # The first of each kind come first, so that no kind is lost.
            small[key] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]
        elif key.endswith(("token_id", "token_index")):
            small[key] = _known(value)
    if shape.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    if shape.get("n_group"):
        small["n_group"], small["topk_group"] = min(shape["n_group"], 2), 1
    return small


def _known(token: Any) -> Any:  # noqa: ANN401
    """A token, or several, that a small vocabulary has."""
    if isinstance(token, list):
        return [_known(one) for one in token]
    return token % _TINY["vocab_size"] if isinstance(token, int) and token >= 0 else token
