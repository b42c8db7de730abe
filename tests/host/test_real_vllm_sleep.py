"""A real vLLM on CPU under the sleeper: its routes answer well, and its memory says what they did.

vLLM's allocator gives memory back on GPUs alone. On CPU ``/sleep`` answers 200, ``/is_sleeping``
says true and nothing is freed: what a status would take for sleep is found out and recorded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from rose_agent.devices.usage import ResidentMeter
from rose_agent.sleeper.sleeper import SleeperRecord, tree
from rose_core.devices.sleeper import SleepStage
from rose_dev import vllm_environment
from rose_dev.models import make_named
from rose_engines.node.rundir import read_json
from rose_engines.process.sleep import VllmServing
from rose_wire.ports import free_port
from tests.host.helpers import until
from tests.host.test_sleeper import Grant, grant

__all__ = ["grant"]

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
READY_SECONDS = 300.0
KV_BYTES = 1 << 30


@contextmanager
def vllm(folder: Path) -> Iterator[tuple[str, int]]:
    """Its URL and its first process."""
    port = free_port()
    argv = vllm_environment.command(make_named("tiny"), port, running=4, context=2048)
    environment = vllm_environment.environment() | {"VLLM_SERVER_DEV_MODE": "1"}
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            argv, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def stage(path: Path, wanted: SleepStage) -> SleeperRecord:
    async def there() -> bool:
        reported = read_json(path, SleeperRecord)
        return reported is not None and reported.sleeper.stage is wanted

    await until(there, f"serving is {wanted}", 120.0)
    found = read_json(path, SleeperRecord)
    assert found is not None
    return found


async def test_a_sleep_that_frees_nothing_is_recorded_and_serving_answers_as_before(
    rundir: Path, grant: Grant
) -> None:
    record = rundir / "record"
    with vllm(rundir) as (url, pid):
        async with aiohttp.ClientSession() as session:

            async def ready() -> bool:
                try:
                    async with session.get(f"{url}/health") as reply:
                        return reply.status == 200
                except aiohttp.ClientError:
                    return False

            await until(ready, "vLLM serves", READY_SECONDS)
            serving = VllmServing(session, url)
            before = await serving.probe()
            command = [sys.executable, "-m", "rose_agent.sleeper.sleeper", "--engine", "VLLM"]
            command += ["--url", url, "--grant", str(grant.path), "--record", str(record)]
            command += ["--pid", str(pid), "--release-bytes", str(KV_BYTES // 2)]
            man = subprocess.Popen([*command, "--vacate-seconds", "0"])  # noqa: ASYNC220
            try:
                falling = await stage(record, SleepStage.FALLING)
                assert falling.reference == before
                held = ResidentMeter().read(tree(pid), ())
                async with session.get(f"{url}/is_sleeping") as reply:
                    assert await reply.json() == {"is_sleeping": True}
                awake = await stage(record, SleepStage.AWAKE)
                assert awake.sleeper.refusal == "NothingReleased"
                after = ResidentMeter().read(tree(pid), ())
                assert held is not None
                assert after is not None
                assert abs(after - held) < KV_BYTES // 4
                async with session.get(f"{url}/is_sleeping") as reply:
                    assert await reply.json() == {"is_sleeping": False}
                assert await serving.probe() == before
            finally:
                man.kill()
                man.wait()
