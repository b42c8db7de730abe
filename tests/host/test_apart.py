"""The engine host without a right of its own, on real cgroups: it does all that it did as root."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from rose_agent.errors import NoFreezer
from rose_agent.os import freezers
from rose_agent.os.find_group import find_group
from rose_core.wire.host import EngineState, SetDormant
from rose_engines.node.rundir import EngineFile, RunDir, read_json
from rose_wire.rpc import call
from rose_wire.services import DORMANT, ENSURE, STOP
from tests.host.apart import FIRST, HOST, ApartHost, apart, everybodys_python, refusal
from tests.host.helpers import BEARER, body, generated, guarding, order, stop, until


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    with everybodys_python() as found:
        if reason := refusal(found):
            pytest.skip(reason)
        yield found


@pytest.fixture
def shared_models(models: Path) -> Iterator[Path]:
    """The models where other users may read them."""
    folder = Path(tempfile.mkdtemp(prefix="models", dir="/tmp"))
    shutil.copytree(models, folder, dirs_exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["v1", "v2", "signals"])
def driver(request: pytest.FixtureRequest, rundir: Path) -> str:
    try:
        freezers.detect(request.param, scope=str(rundir))
    except NoFreezer as error:
        pytest.skip(str(error))
    return str(request.param)


def rights(pid: int) -> dict[str, str]:
    """What ``/proc/PID/status`` says, by the word before the colon."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}


async def test_the_host_has_no_right_while_its_engines_run_and_stop(
    rundir: Path, shared_models: Path, python: Path, driver: str
) -> None:
    async with (
        apart(rundir, shared_models, python, driver, "--engine-shm-mib", "16") as host,
        aiohttp.ClientSession() as client,
    ):
        with guarding(rundir) as guard:
            await call(host.channel, ENSURE, order(token_seconds="0.005"), timeout=10)
            status = await host.serving()
            seen = rights(host.process.pid)
            assert {seen["Uid"], seen["Gid"]} == {"\t".join([str(HOST)] * 4)}
            none = "0" * 16
            assert {value for word, value in seen.items() if word.startswith("Cap")} == {none}
            assert (seen["NoNewPrivs"], seen["Groups"]) == ("1", "")
            engine = rights(status.pids[0])
            assert (engine["Uid"].split()[0], engine["NoNewPrivs"]) == (str(FIRST), "1")
            assert engine["CapEff"] == none
            async with client.post(
                f"{status.endpoint}/generate", json=body(5), headers=BEARER
            ) as reply:
                assert len((await reply.json())["output_ids"]) == 5
            url = record(host).url
            turn = asyncio.create_task(_endless(client, url))

            async def grows() -> bool:
                before = await generated(client, url)
                await asyncio.sleep(0.1)
                return await generated(client, url) > before

            await until(grows, "tokens come")
            guard.close()

            async def stopped() -> bool:
                tree = find_group(record(host))
                return tree is not None and tree.is_frozen()

            await until(stopped, "the engine stands still")
            guard.open()
            await until(grows, "tokens come again")
            turn.cancel()
        gone = await call(host.channel, STOP, stop(), timeout=40)
        assert gone.state is EngineState.GONE
        assert not any(map(psutil.pid_exists, status.pids))
        slot = RunDir(rundir).slot("slot-1")
        assert not slot.folder.exists()


async def _endless(client: aiohttp.ClientSession, url: str) -> None:
    async with client.post(f"{url}/generate", json=body(1_000_000)) as reply:
        await reply.read()


def record(host: ApartHost) -> EngineFile:
    found = read_json(host.rundir.slot("slot-1").engine, EngineFile)
    assert found is not None
    return found


async def test_memory_is_let_go_of_and_taken_back(
    rundir: Path, shared_models: Path, python: Path
) -> None:
    async with apart(rundir, shared_models, python, "auto") as host:
        with guarding(rundir):
            await call(host.channel, ENSURE, order(kv_bytes=str(64 << 20)), timeout=10)
            slot = (await host.serving()).slot
            await call(host.channel, DORMANT, SetDormant(slot, dormant=True), timeout=10)

            async def rests() -> bool:
                status = await host.status()
                return status is not None and status.state is EngineState.DORMANT

            await until(rests, "the engine is dormant")
            await call(host.channel, DORMANT, SetDormant(slot, dormant=False), timeout=10)
            await host.serving()


@pytest.mark.parametrize("victim", ["helper", "host"])
async def test_one_of_the_two_ends_and_all_begins_anew(
    rundir: Path, shared_models: Path, python: Path, driver: str, victim: str
) -> None:
    """Also while the engine is stopped: a frozen task survives a plain SIGKILL."""
    with guarding(rundir) as guard:
        async with apart(rundir, shared_models, python, driver) as host:
            await call(host.channel, ENSURE, order(), timeout=10)
            pids = (await host.serving()).pids
            guard.close()
            await asyncio.sleep(1.0)  # until it stands still
            helper = host.helper
            os.kill(helper.pid if victim == "helper" else host.process.pid, signal.SIGKILL)
            await host.process.wait()
            assert host.process.returncode == (1 if victim == "helper" else -signal.SIGKILL)

            async def gone() -> bool:
                return not any(map(alive, (*pids, helper.pid)))

            await until(gone, "engines and helper are gone")
        guard.open()
        async with apart(rundir, shared_models, python, driver) as host:
            await call(host.channel, ENSURE, order(), timeout=10)
            assert not set((await host.serving()).pids) & set(pids)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
