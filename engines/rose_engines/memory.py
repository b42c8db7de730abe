"""Letting go of an engine's memory without ending it, and taking it back.

Rung 4 of the reclaim ladder needs an engine that gives back what it holds while its process, its
compiled code and its connections stay. What an engine holds is its KV cache, which is worth
nothing once its requests are gone, and its weights, which lie in the model folder as well.
``EngineMemory`` is that face of an engine; ``drop_pages`` is how it is done in host memory: the
addresses stay, so nothing that points to them need know, and only the pages behind them go.
Next step: ``rose_engines.session`` says when; ``rose_engines.sglang.memory`` is SGLang's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

from rose_engines.tensors import Live

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
