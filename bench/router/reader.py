"""A router that decides nothing: ``python -m bench.router.reader URL [--server httptools]``.

It does to a turn what any router that holds tokens must: read the request, ask the engine for a
stream, read its events, write one answer. It has no lease, no queue, no limits and no placement.
Whoever wants to know what of ours is I/O and JSON, and what is ours, compares it with this one.

Both servers have the router's own connections to engines; what parses requests differs: aiohttp,
or llhttp in a protocol that knows one route and reads no header.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import httptools
import msgspec
import uvloop
from aiohttp import web

from rose_core.rollouts.transcripts.transcript import StreamEvent
from rose_router.engines.connections import Connections
from rose_router.engines.engine_client import HttpEngineClient, Target

Answer = Callable[[bytes], Awaitable[bytes]]

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


def answering(url: str) -> Answer:
    """What makes a request's body into its answer's."""
    client, target, numbers = HttpEngineClient(Connections()), Target(url), itertools.count()

    async def answer(body: bytes) -> bytes:
        request: dict[str, Any] = msgspec.json.decode(body)
        request["stream"], request["rid"] = True, f"{next(numbers):032x}"
        ids: list[int] = []
        logprobs: list[Any] = []
        meta: dict[str, Any] = {}

        def take(events: Iterable[StreamEvent]) -> bool:
            for event in events:
                ids.extend(event.ids)
                logprobs.extend(event.per_token["output_token_logprobs"])
                meta.update(event.meta)
            return True

        await client.stream(target, request, take)
        meta["output_token_logprobs"] = logprobs
        return msgspec.json.encode({"text": "", "output_ids": ids, "meta_info": meta})

    return answer


class Caller(asyncio.Protocol):
    """A caller's connection: one request at a time."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of the caller."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._task = asyncio.get_running_loop().create_task(self._reply(b"".join(self._body)))
        self._body.clear()

    async def _reply(self, body: bytes) -> None:
        reply = await self._answer(body)
        if self._transport is not None:
            self._transport.write(_HEAD % (len(reply), reply))


async def _with_httptools(answer: Answer) -> int:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Caller(answer), "127.0.0.1", 0, backlog=4096)
    await server.start_serving()
    return int(server.sockets[0].getsockname()[1])


async def _with_aiohttp(answer: Answer) -> int:
    async def generate(request: web.Request) -> web.Response:
        reply = await answer(await request.read())
        return web.Response(body=reply, content_type="application/json")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return int(runner.addresses[0][1])


SERVERS = {"aiohttp": _with_aiohttp, "httptools": _with_httptools}


async def serve(url: str, server: str) -> None:
    """Run until killed; prints its URL."""
    port = await SERVERS[server](answering(url))
    sys.stdout.write(f"http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--server", choices=SERVERS, default="aiohttp")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(given.url, given.server))
