"""What SGLang itself makes of BF16 matrices and of FP8 ones, run by the engine's Python.

Usage: IN OUT, both safetensors. Of each BF16 matrix NAME: NAME and NAME_scale_inv, as SGLang
quantises it. Of each FP8 matrix with its factors: NAME, as SGLang reads it, in FP32.
"""

# SGLang is not installed where this is checked.
# ruff: noqa: PLC0415

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file

_BLOCK = [128, 128]


def main(given: str, out: str) -> None:
    """Answer for every matrix."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, quant_weight_ue8m0

    reported = load_file(given)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in reported.items():
        if tensor.dtype is torch.bfloat16:
            made[name], made[f"{name}_scale_inv"] = quant_weight_ue8m0(tensor, _BLOCK)
        elif tensor.dtype is torch.float8_e4m3fn:
            factors = reported[f"{name}_scale_inv"]
            made[name] = block_quant_dequant(tensor, factors, _BLOCK, torch.float32)
    save_file({name: one.contiguous() for name, one in made.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
