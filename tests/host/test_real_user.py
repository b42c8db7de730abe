"""Stock SGLang under a user of its own: no new privileges, no token, a limit of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc.aio
import psutil
import pytest

from rose_core.wire.host import EngineState, EngineStatus, HostStatusRequest
from rose_dev.engine_environment import engine_python
from rose_wire import rpc
from rose_wire.errors import WireError
from rose_wire.services import ENSURE, STATUS, STOP
from tests.host import opened
from tests.host.helpers import BEARER, guarding, stop, until
from tests.host.real import READY_SECONDS, needed_model, order

pytestmark = pytest.mark.engine

FIRST = 42_200
SECRETS = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "ROSE_TOKEN": "token-of-the-installation",
    "AWS_SECRET_ACCESS_KEY": "of-the-platform",
}


@dataclass
class Host:
    """An engine host as a process of its own."""

    channel: grpc.aio.Channel

    async def status(self) -> EngineStatus:
        found = await rpc.call(self.channel, STATUS, HostStatusRequest(), timeout=10.0)
        return found.engines[0]

    async def answers(self) -> bool:
        with contextlib.suppress(WireError):
            await rpc.call(self.channel, STATUS, HostStatusRequest(), timeout=2.0)
            return True
        return False

    async def serves(self) -> bool:
        status = await self.status()
        assert status.state is not EngineState.FAILED, status.message
        return status.state is EngineState.SERVING


@contextlib.asynccontextmanager
async def host_of_users(rundir: Path, models: Path, token: Path) -> AsyncIterator[Host]:
    """``rose engine-host --engine-uid``, where other users reach the engine environment."""
    folders = [engine_python().parents[1], models, engine_python().resolve().parents[1]]
    # The checkout too: ROSE's packages are run from there, and it may lie in root's home.
    folders += [Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]]
    command = [sys.executable, "-I", opened.__file__]
    with tempfile.TemporaryDirectory(prefix="keep", dir="/tmp") as keep:
        command += [keep, *map(str, folders), "--", sys.executable, "-m", "rose_cli.main"]
        command += ["engine-host", "--rundir", str(rundir), "--models", str(models)]
        command += ["--engine-python", str(engine_python()), "--engine-uid", str(FIRST)]
        command += ["--data-port", "0", "--http-port", "0", "--token-file", str(token)]
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **SECRETS})
        host = Host(rpc.connect(f"local:{rundir / 'host.sock'}"))
        try:
            await until(host.answers, "the engine host answers")
            yield host
        finally:
            await host.channel.close()
            process.terminate()
            assert await process.wait() == 0


def facts(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.skipif(os.geteuid() != 0, reason="changing users needs root")
async def test_a_real_engine_runs_as_nobody_else_without_rights_or_secrets(
    rundir: Path, tmp_path: Path
) -> None:
    model = needed_model()
    token = tmp_path / "token"
    token.write_text(SECRETS["ROSE_TOKEN"])
    token.chmod(0o600)
    async with host_of_users(rundir, model.parent, token) as host, aiohttp.ClientSession() as http:
        with guarding(rundir):
            await rpc.call(host.channel, ENSURE, order(model, "127.0.0.1:1"), timeout=10.0)
            await until(host.serves, "SGLang is ready", READY_SECONDS)
            status = await host.status()
            assert len(status.pids) >= 3  # server, scheduler, detokenizer
            for pid in status.pids:
                reported = facts(pid)
                assert set(reported["Uid"].split()) == set(reported["Gid"].split()) == {str(FIRST)}
                assert reported["Groups"] == ""
                assert (reported["NoNewPrivs"], int(reported["CapEff"], 16)) == ("1", 0)
                assert not SECRETS.keys() & psutil.Process(pid).environ().keys()
            sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": [104, 101], "sampling_params": sampling}
            url = f"{status.endpoint}/generate"
            async with http.post(url, json=body, headers=BEARER) as reply:
                assert len((await reply.json())["output_ids"]) == 8
            ended = await rpc.call(host.channel, STOP, stop(), timeout=60.0)
            assert ended.state is EngineState.GONE
