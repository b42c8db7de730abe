"""A whole engine under a user of its own: it serves, takes weights, rests and comes back."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

import rose_core
import rose_engines
import rose_wire
from rose_agent.host.processes.classes import fake
from rose_agent.host.processes.launchers import EngineOrder, EngineProgram
from rose_agent.host.users.accounts import Accounts
from rose_agent.weightsync.follower import Options
from rose_agent.weightsync.main import Followers
from rose_core.wire.host import EngineState, SetDormant
from rose_core.wire.sync import WeightSource
from rose_engines.node.rundir import RunDir
from tests.host.helpers import (
    BEARER,
    body,
    guarding,
    order,
    running,
    serving,
    status_of,
    stop,
    until,
)
from tests.weightsync.run import RUN, PublishedRun, store_at

FIRST = 42_100
# The test environment's own Python may lie where no other user can go.
PYTHON = Path("/usr/bin/python3")
PATHS = ":".join(
    str(Path(module.__file__ or "").resolve().parents[1])
    for module in (rose_core, rose_engines, rose_wire, msgspec)
)


def refusal() -> str:
    """Why no other user can run the fake engine here; empty when one can."""
    if os.geteuid() != 0:
        return "changing users needs root"
    if not PYTHON.exists():
        return f"there is no {PYTHON}"
    tried = subprocess.run(
        [PYTHON, "-m", "rose_engines.fake", "--help"],
        env={"PYTHONPATH": PATHS},
        user=FIRST,
        group=FIRST,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"{PYTHON} cannot run the fake engine as another user"


def launcher(order: EngineOrder) -> EngineProgram:
    """The fake engine with a Python that everybody may run."""
    return replace(fake(order), environment={"PYTHONPATH": PATHS, "PYTHONDONTWRITEBYTECODE": "1"})


@pytest.fixture
def shared_models(models: Path) -> Iterator[Path]:
    """The models where other users may read them."""
    folder = Path(tempfile.mkdtemp(prefix="models", dir="/tmp"))
    shutil.copytree(models, folder, dirs_exist_ok=True)
    folder.chmod(0o755)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)
    yield folder
    shutil.rmtree(folder)


async def test_an_engine_of_another_user_does_everything_an_engine_must(
    rundir: Path, shared_models: Path, tmp_path: Path
) -> None:
    if reason := await asyncio.to_thread(refusal):
        pytest.skip(reason)
    async with (
        running(rundir, shared_models) as host,
        store_at(tmp_path / "store") as address,
        aiohttp.ClientSession() as client,
    ):
        site = host.host._site  # what the flags would have made of it
        site.accounts, site.python, site.launchers = Accounts(FIRST), PYTHON, {"fake": launcher}
        site.accounts.open(RunDir(rundir))
        run = PublishedRun(address, shared_models / "small")
        await run.publish()
        await run.publish()
        syncing = asyncio.create_task(Followers(RunDir(rundir), Options()).run())
        with guarding(rundir):
            wanted = msgspec.structs.replace(
                order(kv_bytes=str(64 << 20)), weights=WeightSource(address, RUN)
            )
            await host.host.ensure(wanted)
            status = await serving(host)
            assert {psutil.Process(pid).uids().real for pid in status.pids} == {FIRST}

            async def newest() -> bool:
                return (await status_of(host)).version == "grpo@1.1"

            await until(newest, "the newest version is attested")
            await host.host.set_dormant(SetDormant(status.slot, dormant=True))

            async def again() -> bool:
                state = (await status_of(host)).state
                if state is EngineState.DORMANT:
                    await host.host.set_dormant(SetDormant(status.slot, dormant=False))
                return state is EngineState.SERVING and await newest()

            async def rests() -> bool:
                return (await status_of(host)).state is EngineState.DORMANT

            await until(rests, "the engine is dormant")
            await until(again, "the engine is back at the newest version")
            url = f"{(await status_of(host)).endpoint}/generate"
            async with client.post(url, json=body(5), headers=BEARER) as reply:
                assert len((await reply.json())["output_ids"]) == 5
            assert (await host.host.stop(stop())).state is EngineState.GONE
        syncing.cancel()
        await asyncio.wait({syncing})
        await run.close()
