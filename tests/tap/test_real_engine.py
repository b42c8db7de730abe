"""The tap beside real engines and under ten thousand connections, request by request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from bench.guard.node import Bench
from bench.guard.serving import SERVING
from bench.tap.against import against
from bench.tap.traffic import Order
from bench.tap.watcher import Watched, watching
from rose_agent.signals.feed import Feed
from rose_agent.signals.snapshot import Snapshot, open_snapshot
from rose_agent.tap import sockets
from rose_core.telemetry.events import EndKind
from rose_dev.engine_testing import RealEngine, start_engine
from rose_engines.process.client import TurnClient
from tests.tap.net import namespace, refusal

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap"),
]
CONNECTIONS = 10_000
EVENTS_PORT = 5557
FEED_PORT = EVENTS_PORT + 1  # "auto" packs it behind the events
KV_EVENTS = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{EVENTS_PORT}"})
VLLM = SERVING["vllm"]


def agree(watched: Watched) -> None:
    """Every request as its client saw it."""
    assert watched.health is not None
    assert (watched.health.lost_ns, watched.health.opaque) == (0, False)
    for client in watched.client:
        tap = watched.tap[client.path]
        assert (tap.how, tap.status, tap.path) == (EndKind.COMPLETE, 200, "/v1/completions")
        assert tap.tokens == client.tokens, client
        assert (tap.ttft_s is not None) == bool(client.first)
        # The kernel's stamps lie inside the client's own span, whatever the machine is doing.
        assert client.sent <= tap.arrived_ns < tap.ended_ns
        if client.first:
            assert tap.arrived_ns < tap.first_ns <= client.first


async def test_every_request_of_a_real_sglang_and_its_own_count(real_engine: RealEngine) -> None:
    real_engine.holder.open()
    agree(await against(real_engine.url, "", "SGLang", 60, aborts=3))


@pytest.mark.vllm
async def test_every_request_of_a_real_vllm_and_its_own_count(short_dir: Path) -> None:
    node = Bench(short_dir, "tiny", VLLM)
    try:
        await node.start_serving()
        agree(await against(node.serving_url, "serving", VLLM.engine, 60, aborts=3))
    finally:
        await node.end("serving")


async def test_the_load_snapshot_of_a_real_sglang_shows_idleness(real_engine: RealEngine) -> None:
    real_engine.holder.open()
    tree = psutil.Process(real_engine.process.pid).children(recursive=True)
    pid = next(p.pid for p in tree if p.cmdline()[0].startswith("sglang::scheduler"))
    descriptor = open_snapshot(pid)
    assert descriptor is not None
    snapshot = Snapshot(descriptor)
    async with asyncio.timeout(60):
        while snapshot.read().running != 0:  # noqa: ASYNC110  # it is memory, it knows no events
            await asyncio.sleep(0.05)
    figures = snapshot.read()
    assert (figures.running, figures.waiting) == (0, 0)
    assert len(figures.activity) == 2
    snapshot.close()


async def test_no_end_of_ten_thousand_short_connections_is_lost(short_dir: Path) -> None:
    async with watching(short_dir) as watcher:
        first = await watcher.run(Order(32, short=CONNECTIONS // 5))
        rest = await watcher.run(Order(32, short=CONNECTIONS))
    for seen, number in ((first, CONNECTIONS // 5), (rest, CONNECTIONS)):
        assert set(seen.tap) == {one.path for one in seen.client}
        assert len(seen.tap) == number
        assert seen.health is not None
        assert (seen.health.in_flight, seen.health.lost_ns) == (0, 0)
    assert rest.grown_bytes < 32 * 2**20


def test_the_load_feed_of_a_real_sglang_tells_work_from_none(tmp_path: Path) -> None:
    """SGLang binds its feed to every address, so it has a network of its own here."""
    feeding = ("--kv-events-config", KV_EVENTS, "--load-publish-endpoint", "auto")
    with (
        namespace() as inside,
        sockets.namespace(inside.path),
        start_engine(tmp_path, more=feeding, apart=True) as engine,
    ):
        asyncio.run(shown_by_the_feed(engine))


async def shown_by_the_feed(engine: RealEngine) -> None:
    feed = Feed("127.0.0.1", FEED_PORT)
    stream = {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True}

    async def shows(running: int) -> None:
        async with asyncio.timeout(60):
            while feed.read().running != running:  # noqa: ASYNC110  # it comes when it comes
                await asyncio.sleep(0.05)

    await shows(0)
    async with TurnClient(engine.url) as client:

        async def ask() -> None:
            async for _ in client.stream([104], stream):
                pass

        asking = asyncio.create_task(ask())
        await shows(1)
        assert feed.read().waiting == 0
        await client.abort_all()
        await asking
        await shows(0)
    feed.close()
