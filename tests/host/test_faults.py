"""The host itself dies or hangs: the engine stops by itself, the next host cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from rose_agent.errors import NoFreezer
from rose_agent.host.processes.repair import repair, thaw_all
from rose_agent.os import freezers
from rose_agent.os.find_group import find_group
from rose_agent.os.processes import start_ticks
from rose_agent.weightsync.plugin import Gate
from rose_core.wire.host import EngineState, EngineStatus, HostStatusRequest
from rose_engines.node.rundir import EngineFile, RunDir, read_json, write_json
from rose_wire.errors import WireError
from rose_wire.rpc import call, connect
from rose_wire.services import ENSURE, STATUS
from tests.host.helpers import BEARER, body, generated, guarding, order, stands_still, until
from tests.host.left import sweep


class HostProcess:
    """``rose engine-host`` as a process of its own, with one serving engine."""

    def __init__(self, rundir: Path, process: asyncio.subprocess.Process) -> None:
        self.rundir = rundir
        self.process = process
        self.channel = connect(f"local:{rundir}/host.sock")

    @property
    def record(self) -> EngineFile:
        found = read_json(RunDir(self.rundir).slot("slot-1").engine, EngineFile)
        assert found is not None
        return found

    async def status(self) -> EngineStatus | None:
        try:
            status = await call(self.channel, STATUS, HostStatusRequest(), timeout=5)
        except WireError:
            return None
        return status.engines[0] if status.engines else None

    async def state(self) -> EngineState | None:
        status = await self.status()
        return status.state if status is not None else None


@contextlib.asynccontextmanager
async def host_process(
    rundir: Path, models: Path, driver: str, drain_seconds: int = 0
) -> AsyncIterator[HostProcess]:
    command = [sys.executable, "-m", "rose_cli.main", "engine-host", "--cgroup", driver]
    command += ["--rundir", str(rundir), "--models", str(models), "--log-level", "WARNING"]
    command += ["--data-port", "0", "--http-port", "0"]
    command += ["--drain-seconds", str(drain_seconds)]
    process = await asyncio.create_subprocess_exec(*command)
    host = HostProcess(rundir, process)
    try:

        async def up() -> bool:
            assert process.returncode is None
            with contextlib.suppress(WireError):
                await call(host.channel, ENSURE, order(token_seconds="0.005"), timeout=5)
                return True
            return False

        await until(up, "the host answers")

        async def serves() -> bool:
            return await host.state() is EngineState.SERVING

        await until(serves, "the engine serves")
        yield host
    finally:
        await host.channel.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.to_thread(sweep, rundir, driver)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def generating(client: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """Keep the engine itself busy, past the host."""

    async def work() -> None:
        # The engine, its host or the test ends the request: that is no news.
        with contextlib.suppress(aiohttp.ClientError):
            async with client.post(f"{url}/generate", json=body(1_000_000)) as reply:
                await reply.read()

    task = asyncio.create_task(work())
    before = await generated(client, url)

    async def grows() -> bool:
        return await generated(client, url) > before

    await until(grows, "tokens come")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_its_host_an_engine_still_obeys_the_permit(
    rundir: Path, models: Path, number: signal.Signals
) -> None:
    async with aiohttp.ClientSession() as client:
        with guarding(rundir) as guard:
            async with host_process(rundir, models, "signals") as host:
                url = host.record.url
                async with generating(client, url):
                    host.process.send_signal(number)
                    guard.close()
                    gate = Gate(RunDir(rundir).slot("slot-1").permit)

                    async def closed() -> bool:
                        return not gate.is_open()

                    await until(closed, "the permit lapses")
                    gate.close()
                    before = await stands_still(lambda: generated(client, url))
                    guard.open()

                    async def grows() -> bool:
                        return await generated(client, url) > before

                    await until(grows, "tokens come again")


@pytest.mark.parametrize("driver", ["v2", "v1", "signals"])
async def test_the_next_host_ends_what_a_killed_one_left_frozen(
    rundir: Path, models: Path, driver: str
) -> None:
    try:
        freezer = freezers.detect(driver, scope=str(rundir))  # type: ignore[arg-type]
    except NoFreezer as error:
        pytest.skip(f"needs root and a writable hierarchy: {error}")
    with guarding(rundir) as guard:
        async with host_process(rundir, models, driver) as host:
            record = host.record
            group = find_group(record)
            assert group is not None
            assert set(record.pids) <= set(group.pids())
            guard.close()

            async def frozen() -> bool:
                return group.is_frozen()

            await until(frozen, "the engine is frozen")
            host.process.kill()
            await host.process.wait()
            assert group.is_frozen()
            assert await asyncio.to_thread(thaw_all, RunDir(rundir), freezer) == 1
            group.freeze()
            await until(frozen, "the engine is frozen again")
            assert await asyncio.to_thread(repair, RunDir(rundir), freezer) == 1
            assert group.pids() == ()
            assert RunDir(rundir).slot("slot-1").permit.exists()
            assert not RunDir(rundir).slot("slot-1").engine.exists()
            assert await asyncio.to_thread(repair, RunDir(rundir), freezer) == 0


async def test_sigterm_ends_a_frozen_engine_and_the_host(rundir: Path, models: Path) -> None:
    with guarding(rundir) as guard:
        async with host_process(rundir, models, "auto") as host:
            pids = host.record.pids
            guard.close()
            group = find_group(host.record)
            assert group is not None

            async def frozen() -> bool:
                return group.is_frozen()

            await until(frozen, "the engine is frozen")
            host.process.terminate()
            assert await asyncio.wait_for(host.process.wait(), 60) == 0
            assert group.pids() == ()
            assert not any(start_ticks(pid) for pid in pids)


async def test_a_host_that_is_replaced_lets_turns_end_and_takes_no_new_ones(
    rundir: Path, models: Path
) -> None:
    async with aiohttp.ClientSession() as client:
        with guarding(rundir):
            async with host_process(rundir, models, "signals", drain_seconds=120) as host:
                status = await host.status()
                assert status is not None
                url = f"{status.endpoint}/generate"
                turn = client.post(url, json=body(1000, stream=True), headers=BEARER)
                async with turn as reply:
                    await reply.content.readline()
                    host.process.terminate()

                    async def refused() -> bool:
                        async with client.post(url, json=body(1), headers=BEARER) as new:
                            return new.status == 503

                    await until(refused, "no new turn is taken")
                    with pytest.raises(WireError, match="being replaced"):
                        await call(host.channel, ENSURE, order("slot-2"), timeout=5)
                    rest = await reply.content.read()
                assert rest.endswith(b"data: [DONE]\n\n")
                assert await asyncio.wait_for(host.process.wait(), 60) == 0


def test_a_stranger_under_an_old_pid_is_left_alone(rundir: Path) -> None:
    """The record of a host long gone names this very process's pid."""
    folder = RunDir(rundir).create().slot("slot-1").create()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    stale = EngineFile("slot-1", pids=(os.getpid(),), pid_namespace=namespace, start_ticks=1)
    write_json(folder.engine, stale)
    assert find_group(stale) is None
    assert repair(RunDir(rundir), freezers.detect("signals", scope=str(rundir))) == 0


def test_pids_of_another_namespace_are_left_alone() -> None:
    foreign = EngineFile("slot-1", pids=(os.getpid(),), pid_namespace=1)
    assert find_group(foreign) is None


def test_a_cgroup_that_is_gone_or_not_mounted_here_is_no_group(tmp_path: Path) -> None:
    gone = EngineFile("slot-1", cgroup_version="v2", cgroup="/gone", cgroup_path="/no/such")
    assert find_group(gone) is None
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text("")
    assert find_group(gone, mountinfo) is None
