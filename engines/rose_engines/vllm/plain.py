"""Linear layers on CPU that compute with their own weight, instead of a packed copy of it.

vLLM's CPU backend packs each matrix for oneDNN or AMX when it is loaded, and throws the weight
away: nothing could be committed into it or attested. On GPUs no such copy is made.
"""

from __future__ import annotations

from typing import Any

TARGET = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"


def keep_weight(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401, ARG001
    """Stands in for vLLM's choice of a kernel."""
    import torch  # noqa: PLC0415  # only inside engines

    layer.cpu_linear = torch.nn.functional.linear
