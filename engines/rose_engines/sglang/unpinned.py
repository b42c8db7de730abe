"""Pinned memory on a machine that has no driver to pin it: ordinary memory.

SGLang's LoRA layers and its hierarchical cache pin tensors whatever the device, and torch refuses
that without a GPU.
Used for its CPU engine alone, as the stand-in for its CUDA kernels is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_FACTORIES = ("tensor", "empty", "zeros", "full", "empty_like")


def stand_in() -> None:
    """From here on nothing is pinned in this process."""
    import torch  # noqa: PLC0415  # only inside engines

    for name in _FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = _itself  # type: ignore[method-assign,assignment]


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the factory
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _itself(tensor: Any, *_: object, **__: object) -> Any:  # noqa: ANN401  # a tensor
    return tensor
