"""Models whose size ROSE does not tell: refused by the name of a field, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from rose_core.devices.model_size import (
    Stored,
    Unsizable,
    as_block_fp8,
    cache_shape,
    weight_bytes,
)
from tests.engines.model_shapes import SHAPES

V3 = SHAPES["deepseek-v3"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (V3 | {"index_topk": 2048}, "index_topk is set.*type of both by the GPU"),
        (
            V3 | {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048},
            "index_topk is set, but how DeepseekV32ForCausalLM",
        ),
        (
            V3 | {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk": 2048},
            "index_topk is set, but how GlmMoeDsaForCausalLM",
        ),
        (
            V3 | {"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": [4, 128]},
            "compress_ratios is set.*compressed by layers",
        ),
        (
            SHAPES["llama"] | {"sparse_attention_config": {"use_sparse_attention": True}},
            "sparse_attention_config is set.*keeps an index",
        ),
    ],
)
def test_a_cache_that_is_not_known_is_refused_with_the_reason(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unsizable, match=words):
        cache_shape(config)


def test_weights_that_sglang_repacks_are_refused_by_the_quantisation() -> None:
    config = SHAPES["gpt-oss"] | {"quantization_config": {"quant_method": "mxfp4"}}
    stored = [Stored("model.layers.0.mlp.experts.down_proj_blocks", "U8", (32, 2880, 90, 16))]
    assert cache_shape(config).windowed
    with pytest.raises(Unsizable, match="quant_method is 'mxfp4', whose weights SGLang repacks"):
        weight_bytes(config, stored)


def test_a_model_in_block_fp8_has_a_byte_for_each_weight_and_a_scale_for_each_block() -> None:
    config = SHAPES["qwen3"]
    stored = [
        Stored("model.embed_tokens.weight", "BF16", (151936, 4096)),
        Stored("model.layers.0.mlp.down_proj.weight", "BF16", (4096, 12288)),
        Stored("model.layers.0.input_layernorm.weight", "BF16", (4096,)),
    ]
    before, after = weight_bytes(config, stored), weight_bytes(*as_block_fp8(config, stored))
    saved = 4096 * 12288
    assert before - after == saved - 32 * 96 * 4
