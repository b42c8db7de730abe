"""A trainer that sends no token has its calls heard, and gets answers as the router gave them."""

from __future__ import annotations

import argparse
import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rose_trainer.adapters.forward import forwarding, main, parser


@dataclass
class Router:
    """A router as far as headers and bytes go."""

    url: str = ""
    seen: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        self.bodies.append(await request.read())
        if request.path == "/cut":
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            assert request.transport is not None
            request.transport.abort()
            return response
        if request.path == "/packed":
            packed = gzip.compress(b"words")
            return web.Response(body=packed, headers={"Content-Encoding": "gzip"})
        headers = {"Retry-After": "7", "X-Rose-Reason": "QueueFull"}
        return web.Response(status=429, body=b"later", headers=headers)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


def renew(token: Path) -> None:
    token.write_text("second\n")


async def test_a_request_goes_on_as_it_is_with_the_token_of_now(
    router: Router, token: Path
) -> None:
    async with (
        forwarding(router.url, token, "127.0.0.1:0") as port,
        aiohttp.ClientSession() as http,
    ):
        mine = {"X-Session-ID": "s", "Authorization": "Bearer guess"}
        where = f"http://127.0.0.1:{port}/generate?a=1"
        async with http.post(where, data=b"{}", headers=mine) as reply:
            assert (reply.status, await reply.read()) == (429, b"later")
            assert reply.headers["Retry-After"] == "7"
        renew(token)
        async with http.get(where) as reply:
            assert reply.status == 429
    first, second = router.seen
    assert (first.method, first.path_qs, router.bodies[0]) == ("POST", "/generate?a=1", b"{}")
    assert first.headers.getall("Authorization") == ["Bearer first"]
    assert first.headers["X-Session-ID"] == "s"
    assert (second.method, second.headers["Authorization"]) == ("GET", "Bearer second")


async def test_packed_bodies_pass_unopened_both_ways(router: Router, token: Path) -> None:
    packed = gzip.compress(b"question")
    async with (
        forwarding(router.url, token, "127.0.0.1:0") as port,
        aiohttp.ClientSession() as http,
    ):
        where, headers = f"http://127.0.0.1:{port}/packed", {"Content-Encoding": "gzip"}
        async with http.post(where, data=packed, headers=headers) as reply:
            assert await reply.read() == b"words"
    assert router.bodies == [b"question"]


async def test_a_stream_that_was_cut_is_cut_for_the_trainer_too(
    router: Router, token: Path
) -> None:
    async with (
        forwarding(router.url, token, "127.0.0.1:0") as port,
        aiohttp.ClientSession() as http,
    ):
        with pytest.raises(aiohttp.ClientError):
            async with http.get(f"http://127.0.0.1:{port}/cut") as reply:
                await reply.read()


async def test_a_router_that_is_away_is_told_as_502(token: Path) -> None:
    async with (
        forwarding("http://127.0.0.1:9", token, "127.0.0.1:0") as port,
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{port}/ready") as reply,
    ):
        assert reply.status == 502
        assert "http://127.0.0.1:9 does not answer" in (await reply.json())["message"]


@pytest.mark.parametrize("address", ["0.0.0.0:8000", "10.0.0.1:8000", "trainer.example:8000"])
def test_a_port_that_others_reach_is_refused(
    address: str, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(
            ["--url=http://r:8000", f"--token-file={token}", f"--address={address}"]
        )
    assert "calls with your token" in capsys.readouterr().err


def test_a_missing_token_is_told_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--url=http://r:8000", f"--token-file={tmp_path / 'none'}", "--address=127.0.0.1:0"]
    assert main(words) == 1
    assert "--token-file" in capsys.readouterr().err


def test_its_default_is_the_port_of_routers() -> None:
    given = parser().parse_args(["--url=http://r:8000", "--token-file=t"])
    assert isinstance(given, argparse.Namespace)
    assert given.address == "127.0.0.1:8000"
