"""The fake engine's memory: real bytes, so that letting go of them can be measured from outside.

``pretend`` is SGLang without its memory saver: it answers well and frees nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from pathlib import Path

from rose_engines.tensors.canonical import Live
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.memory import PAGE, drop_pages


class FakeMemory:
    """Memory of a fake engine.

    Args:
        size: bytes held in the place of a KV cache.
        model: folder the weights come from; None = there are none.
        pretend: say that it was released, and keep it.
        hang: never come back from a release.
    """

    def __init__(
        self, size: int, model: Path | None, *, pretend: bool = False, hang: bool = False
    ) -> None:
        self.abort_all: Callable[[], None] = lambda: None
        self._model = model
        self._pretend, self._hang = pretend, hang
        self._size = size
        self._cache = mmap.mmap(-1, max(PAGE, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.hold()

    def release(self) -> int:
        """Abort everything and let go of the cache; weights are too small to matter."""
        self.abort_all()
        while self._hang:
            time.sleep(1.0)
        if self._pretend:
            return self._size
        return self.drop()

    def drop(self) -> int:
        """Let go of the cache; returns its size."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._cache))
        return drop_pages(address, len(self._cache)) if self._size else 0

    def restore(self, live: Live) -> None:
        """Hold the cache again, and write the weights of the model folder."""
        self.hold()
        if self._model is not None:
            for name, (_, _, bits) in read_checkpoint(self._model).items():
                live[name].put(slice(0, bits.size), bits)

    def hold(self) -> None:
        """Hold the cache: every page of it is written."""
        for place in range(0, self._size, PAGE):
            self._cache[place] = 1
