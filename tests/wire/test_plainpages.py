"""The pages without an HTTP library, asked by an ordinary client and by hand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from rose_wire import plainpages


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("rose_seen", "What was seen.", registry=made).inc(3)
    return made


@asynccontextmanager
async def pages() -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = await plainpages.serve(listener, registry())
    yield listener.getsockname()[1]
    server.close()


async def test_answers_an_ordinary_client() -> None:
    async with pages() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with http.get("/metrics?name=x") as answer:
            assert answer.status == 200
            assert "rose_seen_total 3.0" in await answer.text()
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
        async with http.get("/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
        async with http.head("/healthz") as answer:
            assert answer.headers["Content-Length"] == "3"
        async with http.get("/trace") as answer:
            assert answer.status == 404
        async with http.post("/metrics", data=b"x") as answer:
            assert answer.status == 405


async def test_metrics_ask_for_the_token_where_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plainpages.METRICS_TOKEN, "scrape")
    async with pages() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with http.get("/metrics") as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        async with http.get("/metrics", headers={"Authorization": "Bearer other"}) as answer:
            assert answer.status == 401
        async with http.get("/metrics", headers={"authorization": "bearer scrape"}) as answer:
            assert answer.status == 200
        async with http.get("/healthz") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET / HTTP/1.1\r\n" + b"x" * 40_000])
async def test_whoever_asks_badly_hears_nothing_and_the_next_is_answered(sent: bytes) -> None:
    async with pages() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.write_eof()
        try:
            assert await reader.read() == b""
        except ConnectionResetError:  # it had not read all of it
            assert len(sent) > 16 * 1024
        writer.close()
        url = f"http://127.0.0.1:{port}/healthz"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            assert answer.status == 200
