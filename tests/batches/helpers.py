"""Batch files, and a lease's router as far as batches ask it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

CHAT = "/v1/chat/completions"


def batch_file(count: int, model: str = "policy") -> bytes:
    """So many lines, each asking its own question."""
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": model, "messages": [{"role": "user", "content": f"ask {number}"}]},
        }
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def question(body: Mapping[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def answer_to(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a model says, so that it can be told whose answer it is."""
    message = {"role": "assistant", "content": f"answer to {question(body)}"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "x", "object": "chat.completion", "model": "policy", "choices": [choice]}


@dataclass
class FakeRouter:
    """Answers turns as told, and remembers what it was asked.

    Attributes:
        decide: status of the answer to a body, by its number of tries.
        free: turns wait until it is set.
        models_free: who asks for the models waits until it is set.
    """

    url: str = ""
    decide: Callable[[Mapping[str, Any], int], int] = lambda _body, _tries: 200
    asked: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    tries: Counter[str] = field(default_factory=Counter)
    free: asyncio.Event = field(default_factory=asyncio.Event)
    models_free: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most: int = 0

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.heads.append(dict(request.headers))
        self.tries[question(body)] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.free.wait()
        finally:
            self.running -= 1
        status = self.decide(body, self.tries[question(body)])
        if status != 200:
            return web.json_response({"error": {"message": "told so"}}, status=status)
        return web.json_response(answer_to(body))

    async def models(self, _request: web.Request) -> web.Response:
        await self.models_free.wait()
        return web.json_response({"object": "list", "data": [{"id": "policy"}]})


@contextlib.asynccontextmanager
async def fake_router() -> AsyncIterator[FakeRouter]:
    fake = FakeRouter()
    fake.free.set()
    fake.models_free.set()
    app = web.Application()
    app.add_routes([web.post(CHAT, fake.chat), web.get("/v1/models", fake.models)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


@dataclass
class Caller:
    """A tenant who asks ``rose batches``, or a router before it."""

    url: str
    http: aiohttp.ClientSession
    headers: dict[str, str]

    async def ask(self, method: str, path: str, **given: Any) -> tuple[int, Any]:  # noqa: ANN401  # aiohttp's
        async with self.http.request(
            method, self.url + path, headers=self.headers, **given
        ) as reply:
            return reply.status, await reply.json()

    async def upload(self, content: bytes, purpose: str = "batch") -> tuple[int, Any]:
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        form.add_field("file", io.BytesIO(content), filename="lines.jsonl")
        return await self.ask("POST", "/v1/files", data=form)

    async def begin(self, content: bytes, window: str = "24h", endpoint: str = CHAT) -> str:
        """Upload a file and make a batch of it; the batch's id."""
        status, file = await self.upload(content)
        assert status == 200, file
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": window}
        status, batch = await self.ask("POST", "/v1/batches", json=body)
        assert status == 200, batch
        return str(batch["id"])

    async def ended(self, batch: str, *, within_s: float = 120) -> dict[str, Any]:
        """The batch once it has ended."""
        async with asyncio.timeout(within_s):
            while True:
                status, found = await self.ask("GET", f"/v1/batches/{batch}")
                assert status == 200, found
                if found["status"] in {"completed", "failed", "expired", "cancelled"}:
                    return dict(found)
                await asyncio.sleep(0.02)

    async def lines(self, file: str | None) -> list[dict[str, Any]]:
        """Lines of an output or error file; of none where there is no file."""
        if file is None:
            return []
        async with self.http.get(
            f"{self.url}/v1/files/{file}/content", headers=self.headers
        ) as reply:
            assert reply.status == 200
            return [json.loads(line) for line in (await reply.text()).splitlines()]
