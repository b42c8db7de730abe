"""Who may read what a guard knows: everybody its metrics, the installation's token the rest."""

import argparse
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from rose_agent.devices.static import StaticDriver
from rose_agent.guard import main as agent
from rose_agent.guard.inspection import node_verbs
from rose_agent.guard.loop import Guard, Settings
from rose_agent.signals.reader import DirectReaders
from rose_engines.node.rundir import RunDir
from rose_wire.plainpages import METRICS_TOKEN


@dataclass
class Pages:
    """A guard's pages on the network and on its socket."""

    base: str
    session: aiohttp.ClientSession
    rundir: Path

    async def get(self, page: str, token: str = "") -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.session.get(f"{self.base}{page}", headers=headers) as answer:
            return answer.status


@pytest.fixture
async def pages(
    short_dir: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pages]:
    token, metrics_token = getattr(request, "param", ("secret", ""))
    monkeypatch.setenv(METRICS_TOKEN, metrics_token)
    async with aiohttp.ClientSession() as session:
        rundir = RunDir(short_dir).create()
        guard = Guard(rundir, Settings("n1", token), StaticDriver(None), DirectReaders(session))
        options = argparse.Namespace(http_host="127.0.0.1", http_port=0, node="n1")
        runners = await agent._serve(guard, options)
        host, port = runners[0].addresses[0]
        yield Pages(f"http://{host}:{port}", session, rundir.root)
        for runner in runners:
            await runner.cleanup()


@pytest.mark.parametrize("page", ["/report", "/trace"])
async def test_what_names_pods_needs_the_installations_token(pages: Pages, page: str) -> None:
    assert await pages.get(page) == 401
    assert await pages.get(page, "other") == 401
    assert await pages.get(page, "secret") == 200


async def test_metrics_and_health_are_open_to_scrapers_and_the_kubelet(pages: Pages) -> None:
    assert await pages.get("/metrics") == 200
    assert await pages.get("/healthz") in {200, 503}


@pytest.mark.parametrize("pages", [("", "")], indirect=True)
async def test_without_a_token_nobody_on_the_network_reads_them(pages: Pages) -> None:
    assert await pages.get("/report") == 403
    assert await pages.get("/trace", "guess") == 403


@pytest.mark.parametrize("pages", [("secret", "scrape")], indirect=True)
async def test_metrics_can_be_closed_to_all_but_the_scraper(pages: Pages) -> None:
    assert await pages.get("/metrics") == 401
    assert await pages.get("/metrics", "secret") == 401
    assert await pages.get("/metrics", "scrape") == 200
    assert await pages.get("/healthz") in {200, 503}


async def test_the_nodes_root_reads_them_on_the_socket(pages: Pages) -> None:
    path = pages.rundir / "agent.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    found = await node_verbs.fetch(pages.rundir, "/report")
    assert found["node"] == "n1"
    assert json.dumps(await node_verbs.fetch(pages.rundir, "/trace"))
