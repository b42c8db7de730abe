"""Stands in for SGLang's CUDA kernels on a machine without a GPU.

The real package wants libcuda as soon as it is imported; SGLang's CPU path only imports names from
it and, without speculation, never calls them. What it calls to verify drafted tokens is in
``speculative``, in plain torch. This folder comes first on PYTHONPATH when an engine runs on CPU;
no file of SGLang is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

__version__ = "0.0.0+rose.cpu"

_IN_TORCH = frozenset(
    {
        "assign_extend_cache_locs_cpu",
        "assign_req_to_token_pool_cpu",
        "copy_all_layer_kv_cache_cpu",
        "fill_accept_out_cache_loc_cpu",
        "verify_tree_greedy_cpu",
    }
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Every name is a kernel: one in plain torch, or one that says it is not there."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _IN_TORCH:
        # Not at import: torch takes its time. ``from sgl_kernel import`` would ask this function.
        kernel: Callable[..., Any] = getattr(import_module("sgl_kernel.speculative"), name)
        return kernel

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this engine runs on CPU")

    return missing
