"""What tests of pushed weights share: an ingest that counts, and calls that must be answered.

``FakeIngest`` plays ``rose ingest`` and, as weight-sync would, brings the version to the engines;
``tests/trainer/test_ingest.py`` has the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from tests.router.conftest import Fake, Stage

Make = Callable[..., AbstractAsyncContextManager["Stage"]]
PROMPT = [3, 1, 4, 1, 5]


class FakeIngest:
    """Publishes by counting; engines it was told of get the version after a moment."""

    def __init__(self) -> None:
        self.url = ""
        self.taken: list[tuple[str, str, bool]] = []
        self.engines: list[Fake] = []
        self.status = 200
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def ingest(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked += 1
        await self.gate.wait()
        there = await asyncio.to_thread(Path(body["path"]).exists)
        self.taken.append((body["path"], body["label"], there))
        if self.status != 200:
            return web.json_response({"message": "shards are missing"}, status=self.status)
        version = f"run@1.{len(self.taken)}"
        for engine in self.engines:
            asyncio.get_running_loop().call_later(0.02, self.bring, engine, version)
        return web.json_response({"version": version})

    @staticmethod
    def bring(engine: Fake, version: str) -> None:
        engine.scheduler.session._version = version
        engine.owner.send(version=version, head=version)


async def json_of(call: Any, status: int = 200) -> Any:  # noqa: ANN401  # aiohttp's, JSON
    async with call as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def ok(call: Any) -> None:  # noqa: ANN401  # aiohttp's
    async with call as reply:
        assert reply.status == 200, await reply.text()


def generate(
    s: Stage, most: int = 6, headers: dict[str, str] | None = None, **fields: object
) -> Any:  # noqa: ANN401  # aiohttp's
    sampling = {"max_new_tokens": most, "temperature": 1.0}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **fields}
    return s.post("/generate", body, headers=headers)
