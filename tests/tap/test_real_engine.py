"""The tap beside real engines and under ten thousand connections, request by request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from bench.guard.node import Bench
from bench.guard.serving import SERVING
from bench.tap.against import against
from bench.tap.traffic import Order
from bench.tap.watcher import Watched, watching
from rose_agent.signals.snapshot import Snapshot
from rose_core.telemetry.events import How
from rose_dev.engine_testing import RealEngine
from tests.tap.net import refusal

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "can tap"),
]
CONNECTIONS = 10_000
VLLM = SERVING["vllm"]


def agree(watched: Watched) -> None:
    """Every request as its client saw it."""
    assert watched.health is not None
    assert (watched.health.lost_ns, watched.health.opaque) == (0, False)
    for client in watched.client:
        tap = watched.tap[client.path]
        assert (tap.how, tap.status, tap.path) == (How.COMPLETE, 200, "/v1/completions")
        assert tap.tokens == client.tokens, client
        assert (tap.ttft_s is not None) == bool(client.first)
        # The kernel's stamps lie inside the client's own span, whatever the machine is doing.
        assert client.sent <= tap.arrived_ns < tap.ended_ns
        if client.first:
            assert tap.arrived_ns < tap.first_ns <= client.first


async def test_every_request_of_a_real_sglang_and_its_own_count(real_engine: RealEngine) -> None:
    real_engine.holder.open()
    agree(await against(real_engine.url, "", "SGLang", 60, aborts=3))


@pytest.mark.skipif(bool(VLLM.missing()), reason=VLLM.missing() or "vLLM is here")
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
    snapshot = Snapshot(pid)
    async with asyncio.timeout(60):
        while snapshot.read().running != 0:  # noqa: ASYNC110  # it is memory, it knows no events
            await asyncio.sleep(0.05)
    figures = snapshot.read()
    assert (figures.running, figures.waiting) == (0, 0)
    assert len(figures.activity) == 2
    snapshot.close()


async def test_no_end_of_ten_thousand_short_connections_is_lost(short_dir: Path) -> None:
    async with watching(short_dir, sampled=True) as watcher:
        first = await watcher.run(Order(32, short=CONNECTIONS // 5))
        rest = await watcher.run(Order(32, short=CONNECTIONS))
    for seen, number in ((first, CONNECTIONS // 5), (rest, CONNECTIONS)):
        assert set(seen.tap) == {one.path for one in seen.client}
        assert len(seen.tap) == number
        assert seen.health is not None
        assert (seen.health.in_flight, seen.health.lost_ns) == (0, 0)
    assert rest.grown_bytes < 32 * 2**20
