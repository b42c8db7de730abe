"""A guard tells its node's sandbox host while serving burns its budget, and when that is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rose_agent.guard import main
from rose_agent.guard.links.sandboxlink import SandboxLink
from rose_agent.guard.replicas.pools import Pools
from rose_core.wire.sync import PoolPolicy
from rose_dev.waiting import until
from rose_sandbox.http import ServingTraffic, application
from tests.sandbox.test_host import World

POLICY = PoolPolicy("a/p", "Lend", {}, 8000, percentile=99)


@dataclass
class Served:
    url: str
    traffic: ServingTraffic

    def burns(self) -> bool:
        return self.traffic().serving_burns


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    world, traffic = World(tmp_path), ServingTraffic()
    runner = web.AppRunner(application(world.host, traffic, lambda: "word"))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Served(f"http://127.0.0.1:{runner.addresses[0][1]}", traffic)
    await world.host.close()
    await runner.cleanup()


def burning() -> Pools:
    """A node whose pool has been slow for every second request of the last minute."""
    pools, now = Pools(), time.monotonic_ns()
    for number in range(100):
        pools.state("a/p").burn.add(slow=number % 2 == 0, exposed=False, now_ns=now)
    return pools


async def test_a_budget_that_burns_is_said_and_its_end_too(served: Served) -> None:
    burns = [True]
    link = SandboxLink(served.url, lambda: "word", lambda: burns[0])
    async with aiohttp.ClientSession() as http:
        await link.report(http)
        assert served.burns()
        burns[0] = False
        await link.report(http)
        assert not served.burns()
        served.traffic.burns(60.0)
        await link.report(http)  # all is well and has been: nothing is said
        assert served.burns()


async def test_a_host_that_is_away_is_told_when_it_comes(served: Served) -> None:
    burns = [True]
    link = SandboxLink("http://127.0.0.1:1", lambda: "word", lambda: burns[0])
    async with aiohttp.ClientSession() as http:
        await link.report(http)
    words = ["guess"]
    link = SandboxLink(served.url, lambda: words[0], lambda: burns[0])
    async with aiohttp.ClientSession() as http:
        await link.report(http)
        assert not served.burns()
        words[0] = "word"
        await link.report(http)
        assert served.burns()


def test_pools_of_others_and_pools_that_serve_well_burn_nothing() -> None:
    pools, now = burning(), time.monotonic_ns()
    assert pools.is_burning([POLICY], now)
    assert not pools.is_burning([], now)
    assert not Pools().is_burning([POLICY], now)


def test_a_guard_starts_without_its_word_and_says_what_file_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Secret that was removed must not keep a node from lending."""
    named = ["--sandbox-host=http://a:1", f"--sandbox-token-file={tmp_path / 'token'}"]
    options = main.arguments().parse_args(["--node=n", *named])
    (part,) = main._sandboxes(options, lambda: False)
    headers = part.__self__._headers  # type: ignore[attr-defined]
    assert (headers(), headers()) == ({}, {})
    (found,) = [one.getMessage() for one in caplog.records]
    assert str(tmp_path / "token") in found, "once"
    for word in ("one", "two"):
        (tmp_path / "token").write_text(word)
        assert headers() == {"Authorization": f"Bearer {word}"}


async def test_the_guard_has_it_as_a_part_where_a_host_is_named(
    served: Served, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("word")
    named = [f"--sandbox-host={served.url}", f"--sandbox-token-file={tmp_path / 'token'}"]
    pools = burning()

    def burns() -> bool:
        return pools.is_burning([POLICY], time.monotonic_ns())

    assert main._sandboxes(main.arguments().parse_args(["--node=n"]), burns) == []
    (part,) = main._sandboxes(main.arguments().parse_args(["--node=n", *named]), burns)
    task = asyncio.create_task(part())
    await until(served.burns)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def test_each_host_of_a_node_has_a_token_of_its_own_or_all_have_one(tmp_path: Path) -> None:
    """A lease's hosts have their own; a guard tells those of all leases."""
    hosts = ["--sandbox-host=http://a:1", "--sandbox-host=http://b:1"]
    files = []
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        files.append(f"--sandbox-token-file={tmp_path / name}")

    def reported(*given: str) -> list[dict[str, str]]:
        options = main.arguments().parse_args(["--node=n", *given])
        parts = main._sandboxes(options, lambda: False)
        return [part.__self__._headers() for part in parts]  # type: ignore[attr-defined]

    one, two = ({"Authorization": f"Bearer {word}"} for word in ("one", "two"))
    assert reported(*hosts, *files) == [one, two]
    assert reported(*hosts, files[0]) == [one, one]
    assert reported(*hosts) == [{}, {}]
    with pytest.raises(ValueError, match="2 --sandbox-token-file for 1 --sandbox-host"):
        reported(hosts[0], *files)
