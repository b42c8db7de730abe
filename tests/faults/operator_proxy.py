"""Stands between the operator and a real API server: counts writes, and misbehaves when told to.

Everything is forwarded as it is, watches included, until a fault is set:

| fault | effect |
|---|---|
| ``overload(share)`` | this share of all requests gets 429 with ``Retry-After: 1`` |
| ``refuse(word)`` | writes whose path holds the word get 403 |
| ``drop_watches()`` | open watches end at once |
| ``expire_watches(count)`` | the next watches are told 410 Gone |

What it did is counted: ``refused`` with 429, watches ``dropped`` and ``expired``.
"""

import asyncio
import contextlib
import json
import random
import ssl
import threading
from collections import Counter
from pathlib import Path

import aiohttp
from aiohttp import web

from rose_wire.api_server import find_access

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection", "content-encoding"})


class FaultyProxy:
    """A context manager; ``kubeconfig`` leads through it."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._server = asyncio.run(find_access(kubeconfig)).server
        pki = kubeconfig.parent
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))
        self.kubeconfig = folder / "proxy.conf"
        self.writes: Counter[tuple[str, str]] = Counter()
        self.refused = self.dropped = self.expired = 0
        self._random = random.Random(0)
        self._share = 0.0
        self._word = ""
        self._gone = 0
        self._watches: set[asyncio.Task[object]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "FaultyProxy":
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    # Faults.

    def overload(self, share: float) -> None:
        self._share = share

    def refuse(self, word: str) -> None:
        self._word = word

    def expire_watches(self, count: int) -> None:
        self._gone = count

    def drop_watches(self) -> None:
        def drop() -> None:
            for task in self._watches:
                self.dropped += 1
                task.cancel()

        self._loop.call_soon_threadsafe(drop)

    # The server.

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._http:
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._write_config(runner.addresses[0][1])
            self._started.set()
            await self._end.wait()
            await runner.cleanup()

    def _write_config(self, port: int) -> None:
        cluster = {"server": f"http://127.0.0.1:{port}"}
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "unused"}}],
        }
        self.kubeconfig.write_text(json.dumps(text))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self._random.random() < self._share:
            self.refused += 1
            return _status(429, "TooManyRequests", {"Retry-After": "1"})
        if request.method not in _SAFE:
            self.writes[request.method, request.path] += 1
            if self._word and self._word in request.path:
                return _status(403, "Forbidden", {})
        if request.query.get("watch") == "true":
            return await self._watch(request)
        return await self._forward(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self._gone > 0:
            self._gone -= 1
            self.expired += 1
            gone = {"type": "ERROR", "object": _body(410, "Expired")}
            return web.Response(text=json.dumps(gone) + "\n", content_type="application/json")
        task = asyncio.ensure_future(self._forward(request))
        self._watches.add(task)
        try:
            return await task
        finally:
            self._watches.discard(task)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        url = f"{self._server}{request.path_qs}"
        headers = {
            key: value
            for key, value in request.headers.items()
            if key.lower() not in _HOP | {"authorization"}
        }
        # An empty body would get a content type on its way, and the API server answers 415 to that.
        body = await request.read() or None
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._http.request(
            request.method, url, data=body, headers=headers, timeout=timeout
        ) as reply:
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
            if reply.headers.get("Content-Encoding"):
                kept["Content-Encoding"] = reply.headers["Content-Encoding"]
            answer = web.StreamResponse(status=reply.status, headers=kept)
            with contextlib.suppress(ConnectionError):  # the operator has hung up
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
            return answer


def _status(code: int, reason: str, headers: dict[str, str]) -> web.Response:
    return web.json_response(_body(code, reason), status=code, headers=headers)


def _body(code: int, reason: str) -> dict[str, object]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"{reason}, says the test",
        "reason": reason,
        "code": code,
    }
