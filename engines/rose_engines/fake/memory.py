"""The fake engine's memory: real bytes, so that letting go of them can be measured from outside.

``pretend`` is SGLang without its memory saver: it answers well and frees nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from rose_engines.fake.scheduler import FakeScheduler
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


class FakeSleep:
    """Pauses the engine and lets go of its cache.

    As in an SGLang with memory saver and a copy of its weights: requests that come while it is
    paused wait, the KV cache's pages go and come back. A release beside requests, which would end
    an SGLang, is refused. ``rose_engines.process.sleep`` is who asks:

    POST /pause_generation  /continue_generation
    POST /release_memory_occupation  /resume_memory_occupation
    GET  /server_info

    Args:
        memory: what is let go of.

    Attributes:
        awake: the engine may compute.
    """

    def __init__(self, memory: FakeMemory) -> None:
        self.awake = True
        self._memory = memory

    def add_to(self, application: web.Application, scheduler: FakeScheduler) -> None:
        """Offer the routes."""

        async def release(_: web.Request) -> web.Response:
            busy = any(request.finish is None for request in scheduler.running)
            if self.awake or busy:
                return web.json_response({"message": "not paused, or busy"}, status=400)
            self._memory.drop()
            return web.json_response(None)

        application.add_routes(
            [
                web.get("/server_info", self._info),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._go_on),
                web.post("/release_memory_occupation", release),
                web.post("/resume_memory_occupation", self._resume),
            ]
        )

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"enable_memory_saver": True, "enable_weights_cpu_backup": True})

    async def _pause(self, _: web.Request) -> web.Response:
        self.awake = False
        return web.json_response({"message": "paused", "status": "ok"})

    async def _go_on(self, _: web.Request) -> web.Response:
        self.awake = True
        return web.json_response({"message": "continued", "status": "ok"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._memory.hold()
        return web.json_response(None)
