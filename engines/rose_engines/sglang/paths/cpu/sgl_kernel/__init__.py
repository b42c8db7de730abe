"""Stands in for SGLang's CUDA kernels on a machine without a GPU.

The real package wants libcuda as soon as it is imported; SGLang's CPU path only imports names from
it and never calls them. This folder comes first on PYTHONPATH when an engine runs on CPU; no file
of SGLang is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0+rose.cpu"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Every name is a kernel that says it is not there."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this engine runs on CPU")

    return missing
