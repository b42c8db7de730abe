"""The data route: who may pass, what passes, what happens when either side hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rose_agent.host.route.proxy import LONGEST_BODY, DataProxy, Target, request_ids
from rose_core.identity import SlotUid
from rose_engines.weights.calls import Answer, Call, Draft, Drafted, Refused
from rose_engines.weights.control import ControlServer
from tests.host.helpers import BEARER, TOKEN, body, until


@dataclass
class ScriptedEngine:
    """An engine whose stream the test steers."""

    requests: list[dict[str, object]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    break_off: bool = False
    tokens: int = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        self.requests.append(fields)
        self.keys.add(request.headers.get("Authorization", ""))
        if not fields.get("stream"):
            return web.json_response({"meta_info": {"completion_tokens": 3}})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b'data: {"meta_info": {"completion_tokens": 1}}\n\n')
        await self.go_on.wait()
        if self.break_off:
            assert request.transport is not None
            request.transport.abort()
            return reply
        await reply.write(b'data: {"meta_info": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n')
        return reply

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        self.keys.add(request.headers.get("Authorization", ""))
        return web.Response()

    async def secret(self, _request: web.Request) -> web.Response:
        return web.Response(text="admin")

    def count(self, tokens: int) -> None:
        self.tokens += tokens


@dataclass
class Route:
    engine: ScriptedEngine
    proxy: DataProxy
    client: aiohttp.ClientSession
    base: str
    url: str


@pytest.fixture
async def route() -> AsyncIterator[Route]:
    engine = ScriptedEngine()
    app = web.Application(client_max_size=LONGEST_BODY)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/v1/completions", engine.generate)
    app.router.add_post("/abort_request", engine.abort)
    app.router.add_route("*", "/flush_cache", engine.secret)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    target = Target(f"http://127.0.0.1:{runner.addresses[0][1]}", TOKEN, engine.count, "key")
    idle = Target("", TOKEN, engine.count)
    proxy = DataProxy({"slot-1": target, "idle": idle}.get)
    base = f"http://127.0.0.1:{await proxy.start('127.0.0.1', 0)}/slots"
    async with aiohttp.ClientSession() as client:
        yield Route(engine, proxy, client, base, f"{base}/slot-1")
    engine.go_on.set()
    await proxy.stop()
    await runner.cleanup()


@pytest.mark.parametrize("path", ["generate", "v1/completions"])
async def test_a_plain_reply_passes_and_is_counted(route: Route, path: str) -> None:
    async with route.client.post(f"{route.url}/{path}", json=body(), headers=BEARER) as reply:
        assert reply.status == 200
        assert await reply.json() == {"meta_info": {"completion_tokens": 3}}
    assert route.engine.tokens == 3


async def test_a_stream_is_passed_on_as_it_comes(route: Route) -> None:
    sent = body(stream=True, rid="mine")
    async with route.client.post(f"{route.url}/generate", json=sent, headers=BEARER) as reply:
        # The engine goes on only after its first event has arrived here.
        assert b'"completion_tokens": 1' in await reply.content.readline()
        assert route.engine.tokens == 1
        route.engine.go_on.set()
        assert (await reply.content.read()).endswith(b"data: [DONE]\n\n")
    assert route.engine.tokens == 2
    assert route.engine.requests[0]["rid"] == "mine"
    assert route.engine.aborted == []


async def test_a_caller_that_hangs_up_is_aborted_by_its_own_id(route: Route) -> None:
    sent = body(stream=True, rid="mine")
    async with route.client.post(f"{route.url}/generate", json=sent, headers=BEARER) as reply:
        await reply.content.readline()
        reply.close()

    async def reported() -> bool:
        return route.engine.aborted == ["mine"]

    await until(reported, "the engine is told")


async def test_a_caller_without_an_id_is_given_one_and_aborted_by_it(route: Route) -> None:
    sent = body(stream=True)
    async with route.client.post(f"{route.url}/generate", json=sent, headers=BEARER) as reply:
        await reply.content.readline()
        reply.close()

    async def reported() -> bool:
        return bool(route.engine.aborted)

    await until(reported, "the engine is told")
    assert route.engine.aborted == [route.engine.requests[0]["rid"]]
    assert route.engine.keys == {"Bearer key"}, "the engine's own key, not the caller's token"


async def test_an_engine_lost_inside_a_stream_is_a_broken_stream(route: Route) -> None:
    route.engine.break_off = True
    sent = body(stream=True)
    async with route.client.post(f"{route.url}/generate", json=sent, headers=BEARER) as reply:
        await reply.content.readline()
        route.engine.go_on.set()
        with pytest.raises(aiohttp.ClientError):
            await reply.content.read()


async def test_an_engine_that_is_gone_is_a_502(route: Route) -> None:
    proxy = DataProxy(lambda _uid: Target("http://127.0.0.1:1", TOKEN, lambda _tokens: None))
    url = f"http://127.0.0.1:{await proxy.start('127.0.0.1', 0)}/slots/x/generate"
    async with route.client.post(url, json=body(), headers=BEARER) as reply:
        assert reply.status == 502
        assert "did not answer" in (await reply.json())["error"]["message"]
    await proxy.stop()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "slot-1/flush_cache", 404),
        ("GET", "slot-1/flush_cache", 404),
        ("POST", "slot-1/generate/../flush_cache", 404),
        ("POST", "slot-1/v1/chat/completions", 404),
        ("GET", "slot-1/generate", 405),
        ("POST", "nobody/generate", 404),
        ("POST", "idle/generate", 503),
    ],
)
async def test_nothing_else_passes(route: Route, method: str, path: str, status: int) -> None:
    call = route.client.request(method, f"{route.base}/{path}", json=body(), headers=BEARER)
    async with call as reply:
        assert reply.status == status
    assert route.engine.requests == []


@pytest.mark.parametrize("token", [None, "Bearer wrong", "Bearer ", TOKEN, "Bearer t\xf6ken"])
async def test_only_the_slots_own_token_passes(route: Route, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": token}
    async with route.client.post(f"{route.url}/generate", json=body(), headers=headers) as reply:
        assert reply.status == 401
    assert route.engine.requests == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b'{"rid": 7}', b"\xff\xfe"])
async def test_malformed_bodies_are_refused_here(route: Route, data: bytes) -> None:
    async with route.client.post(f"{route.url}/generate", data=data, headers=BEARER) as reply:
        assert reply.status == 400
        assert "JSON" in (await reply.json())["error"]["message"]
    assert route.engine.requests == []


async def test_an_oversized_body_is_refused(route: Route) -> None:
    data = io.BytesIO(b" " * (LONGEST_BODY + 1))
    with contextlib.suppress(aiohttp.ClientOSError):  # the server may hang up while we still send
        async with route.client.post(f"{route.url}/generate", data=data, headers=BEARER) as reply:
            assert reply.status == 413
    assert route.engine.requests == []


async def test_a_long_prompt_passes(route: Route) -> None:
    sent = io.BytesIO(json.dumps({"input_ids": [100_000] * 400_000}).encode())
    async with route.client.post(f"{route.url}/generate", data=sent, headers=BEARER) as reply:
        assert reply.status == 200
    assert len(route.engine.requests[0]["input_ids"]) == 400_000  # type: ignore[arg-type]


async def test_draining_refuses_new_requests_and_waits_for_old_ones(route: Route) -> None:
    sent = body(stream=True)
    async with route.client.post(f"{route.url}/generate", json=sent, headers=BEARER) as reply:
        await reply.content.readline()
        assert not await route.proxy.drain(0.05)
        refused = route.client.post(f"{route.url}/generate", json=body(), headers=BEARER)
        async with refused as second:
            assert second.status == 503
            assert second.headers["Retry-After"] == "1"
        route.engine.go_on.set()
        await reply.content.read()
    assert await route.proxy.drain(30.0)


async def test_turns_under_way_are_counted_for_each_slot(route: Route) -> None:
    slot = SlotUid("slot-1")
    assert route.proxy.turns(slot) == 0
    sent = body(stream=True)
    async with route.client.post(f"{route.url}/generate", json=sent, headers=BEARER) as reply:
        await reply.content.readline()
        assert (route.proxy.turns(slot), route.proxy.turns(SlotUid("idle"))) == (1, 0)
        route.engine.go_on.set()
        await reply.content.read()

    async def ended() -> bool:
        return not route.proxy.turns(slot)

    await until(ended, "the turn has ended")


async def test_abort_requests_pass(route: Route) -> None:
    url = f"{route.url}/abort_request"
    async with route.client.post(url, json={"rid": "r"}, headers=BEARER) as reply:
        assert reply.status == 200
    assert route.engine.aborted == ["r"]
    assert route.engine.keys == {"Bearer key"}


def test_ids_of_batches_are_kept() -> None:
    sent = json.dumps({"rid": ["a", "b"]}).encode()
    assert request_ids(sent) == (sent, ("a", "b"))
    made, ids = request_ids(b'{"text": "x"}')
    assert json.loads(made) == {"text": "x", "rid": ids[0]}


async def test_drafts_reach_the_plugin_and_nothing_else_of_a_body_does(tmp_path: Path) -> None:
    calls: list[Call] = []

    def handle(call: Call) -> Answer:
        calls.append(call)
        assert isinstance(call, Draft)
        if any(token > 99 for text in call.texts for token in text):
            return Refused("BadDrafts", "token ids from 0 to 99")
        return Drafted(sum(map(len, call.texts)))

    server = ControlServer(tmp_path / "plugin.sock", handle)
    server.start()
    target = Target("http://127.0.0.1:9", TOKEN, lambda _: None, control=tmp_path / "plugin.sock")
    gone = Target("http://127.0.0.1:9", TOKEN, lambda _: None, control=tmp_path / "none.sock")
    proxy = DataProxy({"slot-1": target, "gone": gone}.get)
    base = f"http://127.0.0.1:{await proxy.start('127.0.0.1', 0)}/slots"
    url, sent = f"{base}/slot-1/drafts", {"texts": [[1, 2], [3]], "file_path": "/etc/passwd"}
    async with aiohttp.ClientSession() as client:
        async with client.post(url, json=sent, headers=BEARER) as reply:
            assert (reply.status, await reply.json()) == (200, {"tokens": 3})
        for status, wrong in ((409, {"texts": [[100]]}), (400, {"texts": ["text"]}), (400, {})):
            async with client.post(url, json=wrong, headers=BEARER) as reply:
                assert reply.status == status
        async with client.post(url, json=sent) as reply:
            assert reply.status == 401
        async with client.post(f"{base}/gone/drafts", json=sent, headers=BEARER) as reply:
            assert reply.status == 502
    assert calls == [Draft([[1, 2], [3]]), Draft([[100]])]
    await proxy.stop()
    server.close()
