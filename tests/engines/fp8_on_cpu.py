"""A plugin of SGLang for tests: layers in FP8 blocks on any CPU, loaded as on Hopper.

On a CPU SGLang repacks such layers for its AMX kernels, and refuses them where it has none. Here
they take the branch that GPUs take, which leaves weights and factors as the checkpoint has them,
and two kernels are plain torch: what Triton's do, group by group of 128, in 32 bits.
"""

# SGLang is not installed where this is checked.
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import Any

import torch

_GROUP = 128
_LARGEST = 448.0
_KERNEL = "sglang.srt.layers.quantization.fp8_utils.triton_w8a8_block_fp8_linear"
_EXPERTS = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod.apply"


def register() -> None:
    """Called by SGLang in every process of an engine."""
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    fp8._is_cpu = False
    HookRegistry.register(_KERNEL, linear, HookType.REPLACE)
    HookRegistry.register(_EXPERTS, mix, HookType.REPLACE)


def linear(
    input: torch.Tensor,  # noqa: A002  # SGLang passes it by this name
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    **_: Any,  # noqa: ANN401  # of other kernels
) -> torch.Tensor:
    """The layer, with its input quantised as its weight is.

    Args:
        input: [..., columns], BF16.
        weight: [rows, columns], E4M3.
        block_size: rows and columns that share a factor.
        weight_scale: [blocks of rows, blocks of columns], FP32.
        bias: [rows], or none.
    """
    rows, columns = weight.shape
    wide = weight_scale.repeat_interleave(block_size[0], 0)[:rows]
    wide = wide.repeat_interleave(block_size[1], 1)[:, :columns]
    groups = input.to(torch.float32).reshape(-1, columns // _GROUP, _GROUP)
    factors = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / _LARGEST
    rounded = (groups / factors).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    read = (rounded.to(torch.float32) * factors).reshape(-1, columns)
    out = (read @ (weight.to(torch.float32) * wide).T).to(input.dtype)
    if bias is not None:
        out = out + bias
    return out.reshape(*input.shape[:-1], rows)


def mix(method: Any, layer: Any, dispatch_output: Any) -> Any:  # noqa: ANN401  # SGLang's
    """The experts that a router has chosen, one after the other, in the fused matrices' layout.

    Args:
        method: of quantisation.
        layer: [experts, twice the width, columns] and [experts, columns, width], with factors.
        dispatch_output: input, and for each token experts and their shares.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    given, block = dispatch_output.hidden_states, method.quant_config.weight_block_size
    shares, chosen, *_ = dispatch_output.topk_output
    out = torch.zeros_like(given, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        into = layer.w13_weight[expert], block, layer.w13_weight_scale_inv[expert]
        gate, up = linear(given[rows], *into).to(torch.float32).chunk(2, dim=-1)
        inner = (torch.nn.functional.silu(gate) * up).to(given.dtype)
        back = linear(inner, layer.w2_weight[expert], block, layer.w2_weight_scale_inv[expert])
        out.index_add_(0, rows, back.to(torch.float32) * shares[rows, places, None])
    return StandardCombineInput(hidden_states=out.to(given.dtype))
