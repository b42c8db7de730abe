"""A plugin of SGLang for tests: layers in FP8 blocks on any CPU, loaded as on Hopper.

On a CPU SGLang repacks such layers for its AMX kernels, and refuses them where it has none. Here
they take the branch that GPUs take, which leaves weights and factors as the checkpoint has them,
and one kernel is plain torch: what Triton's does, group by group of 128, in 32 bits.
"""

# SGLang is not installed where this is checked.
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import Any

import torch

_GROUP = 128
_LARGEST = 448.0
_KERNEL = "sglang.srt.layers.quantization.fp8_utils.triton_w8a8_block_fp8_linear"


def register() -> None:
    """Called by SGLang in every process of an engine."""
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    fp8._is_cpu = False
    HookRegistry.register(_KERNEL, linear, HookType.REPLACE)


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
