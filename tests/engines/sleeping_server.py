"""A process with the sleep routes of SGLang or vLLM, and memory that it can really let go of.

    python -m tests.engines.sleeping_server KIND PORT MEMORY [FEATURE]

KIND is ``SGLang`` or ``VLLM``. FEATURE says what the real servers were seen to do: ``on`` frees;
``off`` answers 200 and frees nothing (SGLang without memory saver, vLLM without sleep mode);
``missing`` answers 404 (vLLM without its development mode); ``garbage`` comes back with other
weights; ``deaf`` never comes back; ``insomniac``, a vLLM, says that it does not sleep. Like the
real ones: a request waits while the engine is paused or asleep; a release beside requests, and a
resume of what was not released, end an SGLang.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
from collections.abc import Awaitable, Callable

from aiohttp import web

METRICS = """vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0
vllm:kv_cache_usage_perc{{engine="0"}} 0.0
"""


class Server:
    """The engine."""

    def __init__(self, kind: str, memory: int, feature: str) -> None:
        self.kind, self.memory, self.feature = kind, memory, feature
        self.running = 0
        self.released = False
        self.weights = "whole"
        self.awake = asyncio.Event()
        self.awake.set()
        self.pages = self.fill()

    def fill(self) -> mmap.mmap:
        pages = mmap.mmap(-1, self.memory, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.write(b"x" * self.memory)
        return pages

    def let_go(self) -> None:
        self.released = True
        if self.feature != "off":
            self.pages.close()

    def take_back(self) -> None:
        if self.pages.closed:
            self.pages = self.fill()
        self.released = False
        self.weights = "garbage" if self.feature == "garbage" else "whole"

    async def generate(self, _request: web.Request) -> web.Response:
        await self.awake.wait()
        if self.kind == "VLLM":
            return web.json_response({"choices": [{"text": self.weights}]})
        return web.json_response({"output_ids": [len(self.weights)] * 8})

    async def loads(self, _request: web.Request) -> web.Response:
        one = {"num_running_reqs": self.running, "num_waiting_reqs": 0}
        full = {"num_used_tokens": 0, "num_total_tokens": 0, "max_total_num_tokens": 100}
        return web.json_response({"loads": [{**one, **full, "token_usage": 0.0}]})

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=METRICS.format(running=self.running))

    async def pause(self, _request: web.Request) -> web.Response:
        self.awake.clear()
        return web.json_response({"message": "paused", "status": "ok"})

    async def proceed(self, _request: web.Request) -> web.Response:
        self.awake.set()
        return web.json_response({"message": "continued", "status": "ok"})

    async def release(self, _request: web.Request) -> web.Response:
        if self.awake.is_set():
            os._exit(1)
        self.let_go()
        return web.json_response(None)

    async def resume(self, _request: web.Request) -> web.Response:
        if self.feature == "deaf":
            return web.Response(status=500, text="out of memory")
        if not self.released:
            os._exit(1)
        self.take_back()
        return web.json_response(None)

    async def sleep(self, _request: web.Request) -> web.Response:
        self.awake.clear()
        self.let_go()
        return web.Response()

    async def wake_up(self, _request: web.Request) -> web.Response:
        if self.feature == "deaf":
            return web.Response(status=500, text="out of memory")
        self.take_back()
        self.awake.set()
        return web.Response()

    async def is_sleeping(self, _request: web.Request) -> web.Response:
        sleeps = not self.awake.is_set() and self.feature != "insomniac"
        return web.json_response({"is_sleeping": sleeps})

    async def busy(self, request: web.Request) -> web.Response:
        """For the test: so many requests are running."""
        self.running = int(await request.text())
        return web.Response()

    def application(self) -> web.Application:
        made = web.Application()
        made.add_routes([web.post("/test_busy", self.busy)])
        made.add_routes(self.sglang() if self.kind == "SGLang" else self.vllm())
        return made

    def sglang(self) -> list[web.RouteDef]:
        info = {"enable_memory_saver": self.feature != "off", "enable_weights_cpu_backup": True}
        routes = [
            web.get("/server_info", _answer(info)),
            web.get("/v1/loads", self.loads),
            web.post("/generate", self.generate),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.proceed),
            web.post("/resume_memory_occupation", self.resume),
        ]
        if self.feature != "missing":
            routes.append(web.post("/release_memory_occupation", self.release))
        return routes

    def vllm(self) -> list[web.RouteDef]:
        routes = [
            web.get("/metrics", self.metrics),
            web.get("/v1/models", _answer({"data": [{"id": "tiny"}]})),
            web.post("/v1/completions", self.generate),
        ]
        if self.feature != "missing":
            routes += [web.post("/sleep", self.sleep), web.post("/wake_up", self.wake_up)]
            routes += [web.get("/is_sleeping", self.is_sleeping)]
        return routes


def _answer(body: object) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


async def main(kind: str, port: str, memory: str, feature: str = "on") -> None:
    runner = web.AppRunner(Server(kind, int(memory), feature).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
