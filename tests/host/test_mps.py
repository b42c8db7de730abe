"""Engines as MPS clients: admitted, limited, stopped by their permit, ended through the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from rose_agent.host import main
from rose_agent.host.discovery.capabilities import Capabilities
from rose_agent.host.enforcement import enforcer
from rose_agent.host.enforcement.tree import TreeState
from rose_agent.host.processes.classes import fake
from rose_agent.host.processes.launchers import EngineOrder, EngineProgram
from rose_core.guard.standstill import StandstillPatience
from rose_core.identity import SlotUid
from rose_core.wire.host import EngineState, EngineStatus
from tests.host.helpers import (
    BEARER,
    body,
    generated,
    guarding,
    running,
    serving,
    stands_still,
    status_of,
    stop,
    until,
)
from tests.host.mps_node import GPU, Node, node, shared_order


@pytest.fixture
def gpu_node() -> Iterator[Node]:
    with node() as made:
        yield made


@asynccontextmanager
async def hosting(rundir: Path, models: Path, on: Node) -> AsyncIterator[main.RunningHost]:
    async with running(rundir, models) as host:
        host.host._site.means = on.ways  # what the flags would have made of it
        yield host


async def failed(host: main.RunningHost, reason: str) -> EngineStatus:
    async def shows() -> bool:
        status = await status_of(host)
        return (status.state, status.reason) == (EngineState.FAILED, reason)

    await until(shows, f"the engine is refused: {reason}")
    return await status_of(host)


async def test_an_engine_is_admitted_once_serving_has_opted_in_and_leaves_before_it_is_killed(
    rundir: Path, models: Path, gpu_node: Node
) -> None:
    async with hosting(rundir, models, gpu_node) as host, aiohttp.ClientSession() as client:
        with guarding(rundir):
            await host.host.ensure(shared_order())
            refused = await failed(host, "MpsServingOutside")
            assert "mount its directory" in refused.message
            assert gpu_node.clients() == frozenset()
            gpu_node.opt_in()
            status = await serving(host)
            assert gpu_node.clients() == set(status.pids)
            async with client.post(
                f"{status.endpoint}/generate", json=body(5), headers=BEARER
            ) as reply:
                assert len((await reply.json())["output_ids"]) == 5
            assert (await host.host.stop(stop())).state is EngineState.GONE
        assert gpu_node.terminated() == set(status.pids)
        assert gpu_node.clients() == frozenset()
        assert gpu_node.serving in gpu_node.control.servers()[0].clients


async def test_an_engine_of_a_replica_with_several_gpus_is_a_client_of_the_one_daemon(
    rundir: Path, models: Path, gpu_node: Node
) -> None:
    gpu_node.opt_in()
    whole = msgspec.structs.replace(shared_order(), gpu_uuids=(GPU, "GPU-b"))
    async with hosting(rundir, models, gpu_node) as host:
        with guarding(rundir):
            await host.host.ensure(whole)
            status = await serving(host)
            assert gpu_node.clients() == set(status.pids)


async def test_a_client_rests_at_its_permit_and_is_never_frozen(
    rundir: Path, models: Path, gpu_node: Node
) -> None:
    gpu_node.opt_in()
    async with hosting(rundir, models, gpu_node) as host, aiohttp.ClientSession() as client:
        with guarding(rundir) as guard:
            await host.host.ensure(shared_order())
            status = await serving(host)
            life = host.host._lives[SlotUid("slot-1")].current  # its tree, as the enforcer sees it
            url = f"{status.endpoint}/generate"
            async with client.post(url, json=body(5000, stream=True), headers=BEARER):
                guard.close()

                async def stands() -> bool:
                    return life.watched.state is TreeState.STOPPED

                await until(stands, "the engine rests")
                await stands_still(lambda: generated(client, life.url))
                states = {psutil.Process(pid).status() for pid in status.pids}
                assert not states & {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
                before = await generated(client, life.url)
                guard.open()

                async def grows() -> bool:
                    return await generated(client, life.url) > before

                await until(grows, "it goes on")
        assert (await status_of(host)).restarts == 0


async def test_a_client_that_ignores_its_permit_is_taken_from_the_server_and_killed(
    rundir: Path, models: Path, gpu_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enforcer, "PATIENCE", StandstillPatience(300_000_000))
    gpu_node.opt_in()
    async with hosting(rundir, models, gpu_node) as host, aiohttp.ClientSession() as client:
        with guarding(rundir) as guard:
            await host.host.ensure(shared_order(ignore_permit="true"))
            status = await serving(host)
            url = f"{status.endpoint}/generate"
            async with client.post(url, json=body(50_000, stream=True), headers=BEARER):
                guard.close()
                await failed(host, "EngineExited")
        assert gpu_node.terminated() >= set(status.pids)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("-u", "CUDA_MPS_PIPE_DIRECTORY"), "MpsNotAClient"),
        (("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100",), "MpsShareNotGiven"),
    ],
)
async def test_an_engine_that_silently_got_more_than_its_share_is_ended(
    rundir: Path, models: Path, gpu_node: Node, change: tuple[str, ...], reason: str
) -> None:
    def launcher(order: EngineOrder) -> EngineProgram:
        program = fake(order)
        return replace(program, argv=("/usr/bin/env", *change, *program.argv))

    gpu_node.opt_in()
    async with hosting(rundir, models, gpu_node) as host:
        host.host._site.launchers = {"fake": launcher}
        with guarding(rundir):
            await host.host.ensure(shared_order())
            status = await failed(host, reason)
            assert status.endpoint == ""

            async def gone() -> bool:
                return gpu_node.clients() == frozenset()

            await until(gone, "nothing of it is left on the server")


async def test_a_fault_ends_the_engine_until_every_client_has_left(
    rundir: Path, models: Path, gpu_node: Node
) -> None:
    gpu_node.opt_in()
    async with hosting(rundir, models, gpu_node) as host:
        with guarding(rundir):
            await host.host.ensure(shared_order())
            await serving(host)
            gpu_node.send_command("fake_fault")
            refused = await failed(host, "MpsFault")
            assert "FAULT" in refused.message

            async def left() -> bool:
                return gpu_node.clients() == frozenset()

            await until(left, "the engine has left the server")
            gpu_node.send_command(f"fake_leave {gpu_node.serving}")
            gpu_node.opt_in()
            await serving(host)


async def test_what_the_node_can_share_is_said_with_the_reason(
    models: Path, rundir: Path, gpu_node: Node
) -> None:
    ways, driver = gpu_node.ways, gpu_node.ways.mps.driver
    able = Capabilities(ways, driver, 64_000, Path("/usr/bin/python3"), files=())
    await able.refresh()
    assert able.texts[f"MPS/{GPU}"].startswith("MpsServingOutside: ")
    gpu_node.opt_in()
    await able.refresh()
    assert able.texts == {
        "DeviceAccess": "",
        f"MPS/{GPU}": "",
        "DriverMemoryLimit": able.texts["DriverMemoryLimit"],
        "ElasticMemory": able.texts["ElasticMemory"],
    }
    assert "--devices nvml" in able.texts["DriverMemoryLimit"]
    assert "build the engine image with it" in able.texts["ElasticMemory"]
    gpu_node.gpu.end(gpu_node.serving)
    able.files = (Path("/dev/no-such-device"),)
    await able.refresh()
    assert able.texts[f"MPS/{GPU}"].startswith("MpsServingOutside: "), "on another GPU of the node"
    assert "/dev/no-such-device" in able.texts["DeviceAccess"]


async def test_a_host_without_daemons_refuses_mps_and_says_what_is_missing(
    rundir: Path, models: Path
) -> None:
    async with running(rundir, models) as host:
        assert host.host.capabilities()["MPS"].startswith("MpsUnavailable: ")
        with guarding(rundir):
            await host.host.ensure(shared_order())
            refused = await failed(host, "MpsUnavailable")
            assert "--mps-root" in refused.message
