"""The same sandboxes over HTTP: every route, errors by name, and nobody without the token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from rose_core.rights import Listener, verbs
from rose_core.sandboxes.outside import EffectsCrossed, EgressEffect
from rose_core.sandboxes.policy import ModelWait
from rose_core.sandboxes.turns import OutOfTurn
from rose_dev.waiting import until
from rose_sandbox.client import RemoteHost, Sandbox
from rose_sandbox.errors import (
    AlreadyThere,
    BadPath,
    HostAway,
    NotListening,
    UnknownImage,
    UnknownTurn,
)
from rose_sandbox.http import LIFE, ServingTraffic, application
from rose_sandbox.main import parser
from rose_sandbox.metrics import REGISTRY
from tests.sandbox.test_host import World


@dataclass
class Served:
    world: World
    url: str
    app: web.Application
    traffic: ServingTraffic


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    world, traffic = World(tmp_path), ServingTraffic()
    app = application(world.host, traffic, lambda: "word")
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Served(world, f"http://127.0.0.1:{runner.addresses[0][1]}", app, traffic)
    await runner.cleanup()


async def test_an_agent_works_forks_and_leaves_nothing_behind(served: Served) -> None:
    async with Sandbox(session="s", url=served.url, token="word") as box:
        await box.write("/home/a", b"1")
        result = await box.run("cat /home/a")
        assert (result.exit_code, result.stdout) == (0, b"1")
        assert (await box.checkpoint([1, 2])).recoverable_to == 1
        children = await box.fork(2, name="group")
        again = await box.fork(2, name="group")
        assert [one.session for one in again] == [one.session for one in children]
        await box.write("/home/a", b"2")
        for child in children:
            async with child:
                assert await child.read("/home/a") == b"1"
        reported = await box.began(
            [1, 2, 3], weight_versions=["grpo@1.2"], wait=ModelWait(3.0, 0.5)
        )
        assert reported.turn == 2
        assert (await box.ready()).recoverable_to == 2
        assert (await box.suspend()).phase == "suspended"
        assert await box.read("/home/a") == b"2"
    assert served.world.host.sessions() == ()
    assert served.world.records.turns("s") == ()


async def test_a_sandbox_with_a_lifetime_is_forgotten_by_its_host(served: Served) -> None:
    host, now = served.world.host, [0.0]
    host._now = lambda: now[0]
    headers = {"Authorization": "Bearer word"}
    async with aiohttp.ClientSession(headers=headers) as http:
        at = f"{served.url}/sessions"
        for body in ({"session": "s", "lifetime": 60}, {"session": "stays"}):
            async with http.post(at, json=body) as answer:
                assert answer.status == 201
        for wrong in ({"lifetime": 0}, {"template": "t", "lifetime": 1}):
            async with http.post(at, json={"session": "no", **wrong}) as answer:
                assert answer.status == 400, await answer.text()
        now[0] = 59.0
        await host.renew()
        assert host.sessions() == ("s", "stays")
        now[0] = 60.0
        await host.renew()
        assert host.sessions() == ("stays",)
        assert served.world.records.turns("s") == ()


async def test_a_host_says_which_process_it_is(served: Served, tmp_path: Path) -> None:
    lives = set()
    async with aiohttp.ClientSession() as http:
        for path in ("/healthz", "/sessions"):  # refusals too
            async with http.get(served.url + path) as answer:
                lives.add(answer.headers[LIFE])
        assert len(lives) == 1
        runner = web.AppRunner(
            application(World(tmp_path / "other").host, ServingTraffic(), lambda: "word")
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with http.get(f"http://127.0.0.1:{runner.addresses[0][1]}/healthz") as answer:
            assert answer.headers[LIFE] not in lives
        await runner.cleanup()


async def test_a_command_ends_with_its_caller_and_one_with_a_name_is_told_to_the_next(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier waited ten minutes behind a command of an agent that its harness had ended."""
    monkeypatch.setattr("rose_sandbox.http.GONE_SECONDS", 0.05)
    far = RemoteHost(served.url, "word")
    async with Sandbox(session="s", host=far) as box:

        async def gives_up(command: str, name: str | None) -> None:
            asking = asyncio.create_task(box.run(command, name=name))
            there = served.world.host._box("s")
            await until(lambda: there.lock.locked() or name in there.commands)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        await gives_up("sleep 500; echo x >> /home/a", None)
        async with asyncio.timeout(20):
            assert (await box.run("test -e /home/a")).exit_code == 1

        counted = "sleep 0.3; echo x >> /home/b"
        await gives_up(counted, "turn-1")
        for _ in range(2):
            assert (await box.run(counted, name="turn-1")).exit_code == 0
        assert await box.read("/home/b") == b"x\n"
    await far.close()


async def test_errors_come_back_by_their_names(served: Served) -> None:
    far = RemoteHost(served.url, "word")
    with pytest.raises(UnknownImage):
        await Sandbox(host=far, image="none").__aenter__()
    async with Sandbox(session="s", host=far) as box:
        with pytest.raises(AlreadyThere):
            await Sandbox(session="s", host=far).__aenter__()
        with pytest.raises(BadPath):
            await box.read("/none")
        with pytest.raises(UnknownTurn, match="there are: 0"):
            await box.fork(2, 5)
        with pytest.raises(ValueError, match="n is 0"):
            await box.fork(0)
        await box.began([1])
        with pytest.raises(OutOfTurn):
            await box.began([1])
        await box.ready()
        inside = served.world.host._box("s")
        await served.world.host._left(inside, EgressEffect(0, "POST", "pay.example/"))
        with pytest.raises(EffectsCrossed, match=r"POST pay\.example/") as refused:
            await far.restore("s", 1)
        assert refused.value.effects[0].turn == 2
        back = await far.restore("s", 1, flag=True)
        assert (back["ids"], back["told"]["turn"]) == ([1], 1)
    await far.close()


async def test_nobody_calls_without_the_token(served: Served) -> None:
    far = RemoteHost(served.url, "guess")
    with pytest.raises(HostAway, match="bearer token missing or wrong"):
        await far.suspend("s")
    await far.close()
    async with aiohttp.ClientSession() as http:
        for route in served.app.router.routes():
            path = route.get_info().get("path") or route.get_info()["formatter"]
            method = "GET" if route.method == "*" else route.method
            async with http.request(method, served.url + path) as answer:
                assert answer.status == (200 if path in {"/healthz", "/metrics"} else 401)


async def test_metrics_say_what_was_saved_and_what_it_cost(served: Served) -> None:
    def now(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"rose_sandbox_{name}", labels) or 0.0

    full = {"saved": "full", "reason": "changed"}
    before = [now("turns_total", **full), now("record_bytes_total"), now("state_bytes_total")]
    forked = now("restores_total", by="fork")
    async with Sandbox(session="s", url=served.url, token="word") as box:
        await box.write("/home/a", b"1" * 100_000)
        await box.checkpoint([1])
        assert now("turns_total", **full) == before[0] + 1
        wrote, stands = now("record_bytes_total") - before[1], now("state_bytes_total") - before[2]
        assert 0 < wrote < stands  # pages of the same bytes are one
        await box.checkpoint([1, 2])  # nothing has changed: little is written for as much
        assert now("record_bytes_total") - before[1] < 2 * wrote
        assert now("state_bytes_total") - before[2] == 2 * stands
        assert now("sandboxes") == 1
        for child in await box.fork(2):
            async with child:
                assert now("restores_total", by="fork") == forked + 2
    async with aiohttp.ClientSession() as http, http.get(f"{served.url}/metrics") as answer:
        assert "rose_sandbox_held_seconds_total" in await answer.text()


async def test_every_route_stands_in_the_table_of_rights(served: Served) -> None:
    found = set()
    for route in served.app.router.routes():
        path = route.get_info().get("path") or route.get_info()["formatter"]
        if route.method != "HEAD":
            found.add(f"{route.method} {path}")
    assert found == verbs(Listener.SANDBOX)


async def test_a_name_of_several_hosts_is_one_of_them_for_a_caller(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is there, and at no other."""
    port, asked = URL(served.url).port or 0, 0
    addresses = [f"127.0.0.{n}" for n in range(1, 9)]
    others = [await asyncio.start_server(lambda *_: None, one, port) for one in addresses[1:]]

    class Names:
        async def resolve(self, host: str, port: int, family: int) -> list[dict[str, object]]:
            nonlocal asked
            asked += 1
            turned = addresses[asked % 8 :] + addresses[: asked % 8]
            more = {"hostname": host, "port": port, "family": family, "proto": 0, "flags": 0}
            return [more | {"host": one} for one in turned]

        async def close(self) -> None: ...

    monkeypatch.setattr(aiohttp, "DefaultResolver", Names)
    monkeypatch.setattr(secrets, "choice", lambda all_: min(all_, key=lambda one: one["host"]))
    far = RemoteHost(f"http://hosts.example:{port}", "word")
    await asyncio.gather(*(far._call("GET", "", None) for _ in range(16)))
    assert asked == 16, "a connection for each"
    addresses.remove("127.0.0.1")  # that host is gone
    connector = far._http.connector
    assert isinstance(connector, aiohttp.TCPConnector)
    found = await connector._resolver.resolve("hosts.example", port)
    assert found[0]["host"] == "127.0.0.2", "its name leads to another one now"
    await far.close()
    for one in others:
        one.close()


ASKED: list[bytes] = []


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    ASKED.append(head.partition(b"\r\n")[0])
    assert b"word" not in head  # the token is not the sandbox's
    writer.write(b"HTTP/1.0 201 OK\r\nContent-Type: text/x\r\n\r\nhello")
    writer.close()


async def test_a_server_in_the_sandbox_answers_at_its_port(served: Served) -> None:
    headers = {"Authorization": "Bearer word"}
    async with Sandbox(session="s", url=served.url, token="word") as box:
        server = await asyncio.start_server(hello, "127.0.0.1", 0)
        served.world.put_server(server.sockets[0].getsockname())
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.get(f"{served.url}/sessions/s/port/80/a?b=1") as answer:
                assert (answer.status, await answer.text()) == (201, "hello")
            assert ASKED[-1] == b"GET /a?b=1 HTTP/1.0"
            spaced = URL(f"{served.url}/sessions/s/port/80/a%20b%2Fc", encoded=True)
            async with http.get(spaced) as answer:
                assert (answer.status, await answer.text()) == (201, "hello")
            assert ASKED[-1] == b"GET /a%20b%2Fc HTTP/1.0"
            async with http.get(f"{served.url}/sessions/s/port/81/") as answer:
                assert (answer.status, (await answer.json())["error"]) == (502, "NotListening")
            for none in (
                f"{served.url}/sessions/s/port/{number}/" for number in ("0", "65536", "x")
            ):
                async with http.get(none) as answer:
                    assert answer.status == 400, none
            async with http.get(f"{served.url}/sessions/s/tunnel/80") as answer:
                assert answer.status == 400, "no WebSocket"
            async with http.post(f"{served.url}/sessions", json={"sessionkey": "t"}) as answer:
                assert answer.status == 400
                assert "sessionkey" in (await answer.json())["message"]
            reader, writer = await asyncio.open_connection(sock=await box.connect(80))
            writer.write(b"GET /through HTTP/1.0\r\n\r\n")
            assert (await reader.read()).endswith(b"hello")
            assert ASKED[-1] == b"GET /through HTTP/1.0"
            writer.close()
            with pytest.raises(NotListening, match="port 81 of s"):
                await box.connect(81)
            idle, writer = await asyncio.open_connection(sock=await box.connect(80))
            await served.app.shutdown()
            async with asyncio.timeout(20):
                assert await idle.read() == b"", "a host that stops waits for no tunnel"
            writer.close()
            burns = {"serving_burns": True, "seconds": 30}
            async with http.post(f"{served.url}/traffic", json=burns) as answer:
                assert answer.status == 204
        server.close()
    assert served.traffic().serving_burns


def test_a_host_asks_for_a_token_by_default() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--store", "/tmp/s", "--run", "grpo"])
