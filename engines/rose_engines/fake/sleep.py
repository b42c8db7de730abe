"""The fake engine as a serving engine that can sleep: SGLang's routes, and memory that really goes.

POST /pause_generation  /continue_generation
POST /release_memory_occupation  /resume_memory_occupation
GET  /server_info

As in an SGLang with memory saver and a copy of its weights: requests that come while it is paused
wait, the KV cache's pages go and come back. A release beside requests, which would end an SGLang,
is refused. Next step: ``rose_engines.process.sleep`` is who asks.
"""

from __future__ import annotations

from aiohttp import web

from rose_engines.fake.memory import FakeMemory
from rose_engines.fake.scheduler import FakeScheduler


class FakeSleep:
    """Pauses the engine and lets go of its cache.

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
