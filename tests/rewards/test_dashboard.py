"""The dashboard of rewards and batches, asked of a real Prometheus that scrapes real processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from rose_dev import prometheus
from rose_dev.dashboards import rewards
from rose_dev.process_testing import CLI, spawn_process
from rose_rewards.main import running
from tests.batches.helpers import Caller
from tests.batches.processes import COMPLETIONS, ask, engine_of, pair, token_file
from tests.chart.scraping import scraping

pytestmark = pytest.mark.skipif(
    prometheus.find("prometheus") is None, reason="Prometheus is not built: rose dev build"
)
LINES = 40


@contextlib.asynccontextmanager
async def worker(gateway: str, functions: Path) -> AsyncIterator[None]:
    words = (f"--gateway={gateway}", f"--functions={functions}", "--team=")
    child = await spawn_process(CLI, "reward-worker", *words)
    try:
        yield
    finally:
        child.kill()
        await child.wait()


async def answers(url: str, http: aiohttp.ClientSession) -> None:
    """Right ones and wrong ones, until it is cancelled."""
    number = 0
    while True:
        number += 1
        body = {"trajectory": f"t{number}", "function": "exact", "answer": "1"}
        async with http.post(url, json={**body, "expected": str(1 + number % 2)}) as reply:
            assert (await reply.json())["outcome"] == "scored"
        await asyncio.sleep(0.05)


async def test_every_panel_shows_something_while_rewards_and_lines_run(tmp_path: Path) -> None:
    (tmp_path / "functions.yaml").write_text("exact: {rule: exact}\n")
    two = pair(tmp_path, lines=8)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        _, port = await enter(running(tmp_path / "functions.yaml", workers=0))
        await enter(worker(f"http://127.0.0.1:{port}", tmp_path / "functions.yaml"))
        for process in (two.router, two.batches):
            await process.start()
            stack.push_async_callback(process.kill)
        await enter(engine_of(two.attach, "engine"))
        http = await enter(aiohttp.ClientSession())
        asking = asyncio.create_task(answers(f"http://127.0.0.1:{port}/v1/rewards", http))
        stack.callback(asking.cancel)
        (of_batches,) = [w for w in two.batches.words if w.startswith("--address=")]
        pages = {
            "rose-rewards": [f"127.0.0.1:{port}"],
            "rose-batches": [of_batches.removeprefix("--address=")],
        }
        while await ask(http, f"{two.url}/v1/batches") is None:  # noqa: ASYNC110  # other processes
            await asyncio.sleep(0.05)
        found = await asyncio.to_thread(stack.enter_context, scraping(tmp_path, pages))
        team = Caller(two.url, http, {})
        empty = {"not asked yet"}
        async with asyncio.timeout(120):
            while empty:
                assert not asking.done()
                made = await team.begin(token_file(LINES), endpoint=COMPLETIONS)
                await team.ended(made)
                empty = await asyncio.to_thread(found.empty_panels, [rewards.DASHBOARD])
