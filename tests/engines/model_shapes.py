"""Configurations of models as their authors publish them, by a short name.

Shapes are facts about architectures; no weights and no code of theirs are here. ``TINY`` is what
makes a small one of any of them.
"""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]


def _dense(name: str, kind: str, **more: Any) -> Shape:  # noqa: ANN401
    return {"architectures": [name], "model_type": kind, "torch_dtype": "bfloat16", **more}


def _shape(*sizes: int) -> Shape:
    """Layers, width, inner width, heads, heads of keys, words."""
    layers, hidden, inner, heads, kv, words = sizes
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": words,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }


_EIGHT = _shape(36, 4096, 12288, 32, 8, 151936)
_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": None,
}
_DEEPSEEK_MOE = {
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}

SHAPES: dict[str, Shape] = {
    "llama": _dense("LlamaForCausalLM", "llama", **_shape(32, 4096, 14336, 32, 8, 128256)),
    "llama-tied": _dense(
        "LlamaForCausalLM",
        "llama",
        **_shape(16, 2048, 8192, 32, 8, 128256) | {"tie_word_embeddings": True, "head_dim": 64},
    ),
    "qwen2": _dense("Qwen2ForCausalLM", "qwen2", **_shape(28, 3584, 18944, 28, 4, 152064)),
    "qwen3": _dense("Qwen3ForCausalLM", "qwen3", **_EIGHT),
    "qwen3-moe": _dense(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **_shape(48, 2048, 6144, 32, 4, 151936),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "mistral": _dense("MistralForCausalLM", "mistral", **_shape(32, 4096, 14336, 32, 8, 32768)),
    "mixtral": _dense(
        "MixtralForCausalLM",
        "mixtral",
        **_shape(32, 4096, 14336, 32, 8, 32000),
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "gemma2": _dense(
        "Gemma2ForCausalLM",
        "gemma2",
        **_shape(26, 2304, 9216, 8, 4, 256000)
        | {
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
        },
        head_dim=256,
        sliding_window=4096,
    ),
    "gemma3-images": _dense(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        tie_word_embeddings=True,
        # As published: heads are left to the defaults of the class.
        text_config={
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
            "vocab_size": 262208,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=256,
    ),
    "qwen2.5-images": _dense(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        text_config={"model_type": "qwen2_5_vl_text"}
        | _shape(28, 3584, 18944, 28, 4, 152064)
        | {
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}
        },
        vision_config={"model_type": "qwen2_5_vl", "out_hidden_size": 3584},
        tie_word_embeddings=False,
    ),
    "phi3": _dense(
        "Phi3ForCausalLM", "phi3", **_shape(32, 3072, 8192, 32, 32, 32064), pad_token_id=0
    ),
    "glm4-moe": _dense(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        **_shape(46, 4096, 10944, 96, 8, 151552),
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
        first_k_dense_replace=1,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "olmoe": _dense(
        "OlmoeForCausalLM",
        "olmoe",
        **_shape(16, 2048, 1024, 16, 16, 50304),
        num_experts=64,
        num_experts_per_tok=8,
    ),
    "deepseek-v2-lite": _dense(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        **_shape(27, 2048, 10944, 16, 16, 102400),
        **_LATENT,
        **_DEEPSEEK_MOE,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "deepseek-v3": _dense(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_shape(61, 7168, 18432, 128, 128, 129280),
        **_LATENT | {"q_lora_rank": 1536},
        **_DEEPSEEK_MOE
        | {"n_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
    ),
    "qwen3-next": _dense(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        **_shape(48, 2048, 5120, 16, 2, 151936),
        head_dim=256,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        partial_rotary_factor=0.25,
    ),
    "qwen3.5-images": _dense(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        tie_word_embeddings=False,
        text_config={
            "model_type": "qwen3_5_text",
            **_shape(32, 2560, 9216, 16, 4, 248320),
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
        vision_config={"model_type": "qwen3_5", "out_hidden_size": 2560},
    ),
    "falcon-h1": _dense(
        "FalconH1ForCausalLM",
        "falcon_h1",
        **_shape(36, 2048, 4096, 8, 2, 65537),
        head_dim=128,
        mamba_d_conv=4,
        mamba_d_head=64,
        mamba_d_ssm=3072,
        mamba_d_state=256,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_n_heads=48,
    ),
    "granite-hybrid": _dense(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **_shape(40, 2048, 8192, 32, 8, 100352) | {"tie_word_embeddings": True},
        shared_intermediate_size=8192,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=[
            "attention" if number in {10, 13, 17, 27} else "mamba" for number in range(40)
        ],
        mamba_d_conv=4,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_n_heads=64,
        position_embedding_type="nope",
    ),
    "gpt-oss": _dense(
        "GptOssForCausalLM",
        "gpt_oss",
        **_shape(24, 2880, 2880, 64, 8, 201088),
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
        attention_bias=True,
        swiglu_limit=7.0,
    ),
}

# FP8 by blocks, as DeepSeek and Qwen publish it.
SHAPES["qwen3-fp8"] = SHAPES["qwen3"] | {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}

_SMALL = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
# The same architectures, small; those whose other sizes follow from these are left as they are.
for _name in ("llama", "llama-tied", "qwen2", "qwen3", "qwen3-moe", "mistral", "qwen3-next"):
    _shape_of = SHAPES[_name]
    SHAPES[f"{_name}-small"] = _shape_of | {
        key: value for key, value in _SMALL.items() if key in _shape_of
    }
