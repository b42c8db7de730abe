"""Letting go of an engine's memory without ending it, and taking it back.

Rung 4 of the reclaim ladder needs an engine that gives back what it holds while its process, its
compiled code and its connections stay. What an engine holds is its KV cache, which is worth
nothing once its requests are gone, and its weights, which lie in the model folder as well.
``EngineMemory`` is that face of an engine; ``drop_pages`` is how it is done in host memory: the
addresses stay, so nothing that points to them need know, and only the pages behind them go.
Next step: ``rose_engines.weights.session`` says when; ``sglang.memory`` and ``vllm.memory`` are the
engines' own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rose_core.delta.bits import Bits
from rose_engines.tensors.canonical import AT_ONCE, Live, LiveTensor, WholeTensor
from rose_engines.tensors.safetensors import read_checkpoint

if TYPE_CHECKING:
    import torch

_MADV_DONTNEED = 4
PAGE = mmap.PAGESIZE


class EngineMemory(Protocol):
    """An engine that can let go of its memory."""

    def release(self) -> int:
        """Abort every request and let go of cache and weights; in the engine's own thread.

        Returns:
            Bytes that should be free by now.
        """
        ...

    def restore(self, live: Live) -> None:
        """Take both back: an empty cache, and the weights of the model folder.

        Args:
            live: where the weights go; the same tensors as before the release.
        """
        ...


def drop_pages(address: int, length: int) -> int:
    """Give the whole pages of private, anonymous memory back; they read as zero afterwards.

    Returns:
        Bytes given back, less than ``length`` where it does not begin and end with a page.

    Raises:
        OSError: the kernel refused.
    """
    first = -(-address // PAGE) * PAGE
    end = (address + length) // PAGE * PAGE
    if end <= first:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    dropped = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)
    if dropped != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "madvise")
    return end - first


def drop_all(places: Mapping[int, int]) -> int:
    """The same for several: address -> length in bytes."""
    return sum(drop_pages(*place) for place in places.items())


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory behind the tensors, each once, however many share it."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def tensors_in(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """What an engine keeps for its layers: a tensor, a nested list of them, or something else."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "untyped_storage"):
        yield value


def reload_weights(parameters: Iterable[torch.Tensor], live: Live, folder: Path) -> None:
    """Write the weights of the model folder into a model, and zeros for padding.

    Args:
        parameters: all of the model's.
        live: where its checkpoint tensors lie in them; a tied name may be left out.
        folder: the model folder.
    """
    for parameter in parameters:
        parameter.zero_()
    for name, (_, _, bits) in read_checkpoint(folder).items():
        if name in live:
            overwrite(live[name], np.asarray(bits))


def overwrite(tensor: LiveTensor, bits: Bits) -> None:
    """Overwrite a tensor, wherever its elements lie in the engine's."""
    size = bits.size if isinstance(tensor, WholeTensor) else AT_ONCE
    for first in range(0, bits.size, size):
        part = bits[first : first + size]
        where, kept = tensor.own(slice(first, first + part.size))
        tensor.put(where, part if kept is None else part[kept])
