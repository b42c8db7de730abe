"""Two routers of one lease as processes that prove themselves to each other by certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rose_core.rollouts.capacity.replicas import home_of
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.cluster.pki import Authority
from rose_dev.process_testing import CLI, spawn_process
from rose_engines.fake.model import continuation
from rose_engines.fake.scheduler import FakeScheduler
from rose_engines.fake.server import FakeServer
from rose_engines.weights.session import WeightSession
from rose_router.flags import parser, settings
from rose_wire import tls
from rose_wire.ports import free_ports
from rose_wire.rpc import connect, converse
from rose_wire.services import ATTACH
from tests.router.conftest import LEASE, VERSION
from tests.router.test_http import PROMPT, ask
from tests.wire.test_tls import issue

NAMES = ("127.0.0.1", "127.0.0.2")


class Pair:
    """Where two replicas listen; the ports are the same on both addresses."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.authority = authority
        self.folder = issue(authority, folder / "tls")
        self.token = folder / "token"
        self.token.write_text("secret")
        self.http, self.attach, self.peer = free_ports(3)

    def flags(self, address: str) -> list[str]:
        return [
            f"--lease={LEASE}",
            f"--http-address={address}:{self.http}",
            f"--attach-address={address}:{self.attach}",
            f"--peer-address={address}:{self.peer}",
            f"--token-file={self.token}",
            f"--replica={address}",
            f"--replicas-dns={','.join(NAMES)}",
            "--peer-name=localhost",
            f"--tls-dir={self.folder}",
            f"--tls-client-ca={self.authority.certificate}",
            f"--peer-ca={self.authority.certificate}",
            "--drain-seconds=0",
        ]

    @asynccontextmanager
    async def process(self, address: str) -> AsyncIterator[None]:
        words = ("router", *self.flags(address))
        child = await spawn_process(CLI, *words, stderr=asyncio.subprocess.DEVNULL)
        try:
            yield
        finally:
            child.kill()
            await child.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path, Authority(tmp_path / "pki"))


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    scheduler = FakeScheduler(WeightSession({}, VERSION), token_seconds=0.001)
    runner = web.AppRunner(FakeServer(scheduler).application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def attached(pair: Pair, update: EngineUpdate) -> AsyncIterator[None]:
    """An engine's owner that dials the first replica, with a certificate of its own."""

    async def updates() -> AsyncIterator[EngineUpdate]:
        yield update
        await asyncio.Event().wait()

    async def stay() -> None:
        credentials = tls.client_credentials(pair.authority.certificate, pair.folder)
        async with connect(f"{NAMES[0]}:{pair.attach}", credentials=credentials) as channel:
            async for _note in converse(channel, ATTACH, updates(), token="secret"):
                pass

    task = asyncio.create_task(stay())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def status(http: aiohttp.ClientSession, url: str) -> int:
    try:
        async with http.get(url) as reply:
            return reply.status
    except aiohttp.ClientError:
        return 0


async def answered(http: aiohttp.ClientSession, url: str) -> None:
    while await status(http, url) != 200:  # noqa: ASYNC110  # another process
        await asyncio.sleep(0.1)


def key_of(name: str) -> str:
    return next(key for key in map(str, range(1000)) if home_of(key, NAMES) == name)


async def test_two_processes_share_engines_and_trajectories_over_mutual_tls(
    pair: Pair,
) -> None:
    one, two = (f"http://{name}:{pair.http}" for name in NAMES)
    async with (
        asyncio.timeout(240),
        engine() as url,
        pair.process(NAMES[0]),
        pair.process(NAMES[1]),
        aiohttp.ClientSession() as http,
    ):
        await answered(http, f"{one}/health")
        await answered(http, f"{two}/health")
        update = EngineUpdate(
            "e", EngineKind.BORROWED, LEASE, url, gate_open=True, cap=8, version=VERSION
        )
        async with attached(pair, update):
            await answered(http, f"{two}/ready")  # over the relay
            body = ask(session_id=key_of(NAMES[1]))
            async with http.post(f"{one}/generate", json=body) as reply:
                answer = await reply.json()
            assert answer["output_ids"] == continuation(PROMPT, 12, VERSION)
            async with http.get(f"{two}/turns") as reply:
                assert [turn["session"] for turn in (await reply.json())["recent"]] == [
                    key_of(NAMES[1])
                ]
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"https://{NAMES[0]}:{pair.peer}/health", ssl=strange(pair))


def strange(pair: Pair) -> ssl.SSLContext:
    """A caller that believes the replica and has no certificate."""
    context = ssl.create_default_context(cafile=pair.authority.certificate)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # where the refusal is part of the handshake
    return context


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--tls-dir"}, "--peer-ca needs --tls-dir"),
        ({"--replica"}, "needs --replica"),
    ],
)
def test_what_replicas_need_is_asked_for_by_name(
    pair: Pair, changed: set[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POD_IP", raising=False)
    kept = [flag for flag in pair.flags(NAMES[0]) if flag.split("=")[0] not in changed]
    with pytest.raises(ValueError, match=words):
        settings(parser().parse_args(kept))


def test_the_urls_tls_with_replicas_needs_their_own(pair: Pair) -> None:
    flags = [f"--lease={LEASE}", "--replicas-dns=x", "--replica=a", f"--http-tls-dir={pair.folder}"]
    with pytest.raises(ValueError, match="needs --peer-ca and --tls-dir"):
        settings(parser().parse_args(flags))
