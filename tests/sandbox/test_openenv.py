"""OpenEnv's own client, server and template, unmodified, on sandboxes: ``make sandbox-openenv``.

The environment is the one that ``openenv init`` writes: each connection has a count of steps in the
memory of its server, and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rose_sandbox.client import RemoteHost
from rose_sandbox.main import RUNTIMES
from rose_sandbox.runtimes.parts import Parts
from tests.sandbox.hosts import Running, two_hosts

pytestmark = pytest.mark.sandbox

CACHE = Path(os.environ.get("ROSE_CACHE") or Path.home() / ".cache" / "rose")
PARTS, PYTHON = CACHE / "openenv" / "parts", CACHE / "openenv" / "venv" / "bin" / "python"
WHOLE = CACHE / "openenv" / ".made-of"
CHECKOUT = Path(__file__).parents[2]
PACKAGES = [str(CHECKOUT / name) for name in ("sandbox", "weights", "wire", "")]
BEFORE_THE_KILL = 5
"""Turns of ``episode.py``: when the server was ready, ``reset``, three steps. The last one begins
only after its answer is given, so what is saved may be the one before."""
PROGRAMS = Path(__file__).parent / "openenv"


def need_openenv() -> None:
    if not WHOLE.exists():  # an environment alone is half of what an interrupted set-up left
        pytest.skip("OpenEnv is not installed; make sandbox-openenv")


@dataclass
class Hosts:
    """Two hosts, of which the first one dies."""

    first: Running
    second: Running

    @property
    def urls(self) -> tuple[str, str]:
        return self.first.url, self.second.url

    async def lose_first(self, by: signal.Signals) -> None:
        self.first.process.send_signal(by)
        if by is signal.SIGKILL:
            await asyncio.to_thread(self.first.process.wait)

    async def saved(self, session: str) -> bool:
        """Whether the first one has what was said last, as it has after a wait for a model."""
        far = RemoteHost(self.first.url, "word")
        try:
            result = await far.state(session)
        finally:
            await far.close()
        return result.recoverable_to == BEFORE_THE_KILL

    async def sessions(self) -> list[str]:
        """Sessions that the second host knows."""
        async with (
            aiohttp.ClientSession(headers={"Authorization": "Bearer word"}) as http,
            http.get(f"{self.second.url}/sessions") as answer,
        ):
            found: list[str] = (await answer.json())["sessions"]
            return found


@pytest.fixture(params=["runc"])
async def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Hosts]:
    need_openenv()
    async with two_hosts(tmp_path, Parts(PARTS), RUNTIMES[request.param]) as (first, second):
        yield Hosts(first, second)


async def started(program: str, tmp_path: Path, *words: str) -> Process:
    """A program of OpenEnv's environment, with this checkout."""
    return await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(PROGRAMS / program), *words),
        env={
            **{name: os.environ[name] for name in ("PATH", "HOME")},
            "PYTHONPATH": os.pathsep.join((*PACKAGES, str(tmp_path))),
        },
        stdin=PIPE,
        stdout=PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )


async def until_it_prints(process: Process, marker: str) -> str:
    """What it said up to a line with a word."""
    text = ""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        text += line
        if marker in line:
            return text
    raise AssertionError(text)


@pytest.fixture
async def counter(tmp_path: Path) -> Path:
    """An environment as ``openenv init`` writes it."""
    need_openenv()
    made = await asyncio.create_subprocess_exec(
        *(str(PYTHON.with_name("openenv")), "init", "counter"), cwd=tmp_path, stdout=PIPE
    )
    output, _ = await made.communicate()
    assert made.returncode == 0, output.decode()
    return tmp_path / "counter"


@pytest.mark.parametrize(
    ("hosts", "by"),
    [("runc", signal.SIGKILL), ("runsc", signal.SIGKILL), ("runc", signal.SIGSTOP)],
    indirect=["hosts"],
)
async def test_an_episode_goes_on_in_the_same_connection_when_its_host_is_killed_or_hangs(
    hosts: Hosts, counter: Path, tmp_path: Path, by: signal.Signals
) -> None:
    process = await started("episode.py", tmp_path, str(counter), *hosts.urls)
    try:
        await until_it_prints(process, "KILL")
        while not await hosts.saved("episode"):  # noqa: ASYNC110 - another process knows
            await asyncio.sleep(0.2)
        await hosts.lose_first(by)
        output, _ = await asyncio.wait_for(process.communicate(b"killed\n"), 200)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    assert await hosts.sessions() == [], "closed with its client"
    far = RemoteHost(hosts.urls[1], "word")
    await far.end("episode", forget=True)
    await far.close()


async def test_with_a_router_it_goes_on_where_the_router_puts_it(
    hosts: Hosts, counter: Path, tmp_path: Path
) -> None:
    far, asked = RemoteHost(hosts.urls[1], "word"), []

    async def restore(request: web.Request) -> web.Response:  # as a router's
        asked.append((request.match_info["key"], request.headers["Authorization"]))
        return web.json_response({"host": hosts.urls[1]} | await far.restore("episode"))

    app = web.Application()
    app.add_routes([web.post("/sessions/{key}/restore", restore)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    router = f"http://127.0.0.1:{runner.addresses[0][1]}"
    process = await started("episode.py", tmp_path, str(counter), *hosts.urls, router)
    try:
        await until_it_prints(process, "KILL")
        await hosts.lose_first(signal.SIGKILL)
        output, _ = await asyncio.wait_for(process.communicate(b"killed\n"), 200)
        assert process.returncode == 0, output.decode()
        assert asked == [("episode", "Bearer turns")]
        await far.end("episode", forget=True)
    finally:
        if process.returncode is None:
            process.kill()
        await far.close()
        await runner.cleanup()


async def test_what_cannot_be_started_is_told_by_openenvs_own_errors(
    hosts: Hosts, tmp_path: Path
) -> None:
    process = await started("refusals.py", tmp_path, *hosts.urls)
    output, _ = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 0, output.decode()
    assert await hosts.sessions() == []


async def test_a_conversation_outlives_the_way_that_carries_it(tmp_path: Path) -> None:
    need_openenv()
    process = await started("lines.py", tmp_path)
    output, _ = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, output.decode()
