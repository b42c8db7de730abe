"""An MPS client that rests takes little of the cores, and all it may when it computes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rose_agent.errors import GroupError
from rose_agent.host.enforcement.tree import TreeState
from rose_agent.host.slots.cpu_throttle import CpuThrottle, ThrottledEngine, is_busy_quota
from rose_agent.host.slots.lifecycle import EngineLife
from rose_agent.os import freezers
from rose_agent.os.limits import CgroupBase, Limiter, Limits
from rose_core.wire.host import EngineState
from tests.host.test_limits import engine, root_only

BUSY = 10


def mps_client(tree: TreeState) -> ThrottledEngine:
    return ThrottledEngine("engine", EngineState.SERVING, tree, by_mps=True)


def test_only_an_mps_client_that_serves_and_rests_has_the_busy_quota() -> None:
    low = {
        (state, tree, by_mps)
        for state in EngineState
        for tree in TreeState
        for by_mps in (True, False)
        if is_busy_quota(state, tree, by_mps=by_mps)
    }
    assert low == {(EngineState.SERVING, TreeState.STOPPED, True)}


@pytest.mark.parametrize(
    ("version", "own", "low", "high"),
    [
        (2, 0, {"cpu.max": "2000 20000"}, {"cpu.max": "max 100000"}),
        (2, 150, {"cpu.max": "2000 20000"}, {"cpu.max": "150000 100000"}),
        (
            *(1, 5),
            {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "1000"},
            {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "5000"},
        ),
    ],
)
def test_the_quota_follows_the_engine(
    tmp_path: Path, version: int, own: int, low: dict[str, str], high: dict[str, str]
) -> None:
    limits = Limits(cpu_percent=own, busy_cpu_percent=BUSY)
    limiter = Limiter(limits, {"cpu": CgroupBase(version, tmp_path)}, "rose-test-")
    (folder,) = limiter.prepare("engine")
    courtesy = CpuThrottle(limiter)

    def written() -> dict[str, str]:
        return {path.name: path.read_text() for path in folder.iterdir()}

    assert written() == high
    for tree, wanted in ((TreeState.STOPPED, low), (TreeState.RUNNING, high)) * 2:
        courtesy.apply([mps_client(tree)])
        assert written() == wanted
    courtesy.apply([])


def test_a_quota_that_cannot_be_set_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter(
        Limits(busy_cpu_percent=BUSY), {"cpu": CgroupBase(2, tmp_path / "no")}, "rose-"
    )
    with pytest.raises(GroupError, match="cannot set the quota"):
        limiter.set_quota("engine", busy=True)
    courtesy = CpuThrottle(limiter)
    for _ in range(3):
        courtesy.apply([mps_client(TreeState.STOPPED)])
    assert len(caplog.records) == 1


@root_only
async def test_a_real_process_is_held_to_the_busy_quota_and_let_go_again(tmp_path: Path) -> None:
    script = "while True: pass"
    async with engine(tmp_path, Limits(busy_cpu_percent=BUSY), script) as (spawned, limiter):

        async def used_share() -> float:
            loop = asyncio.get_running_loop()
            before, began = spawned.group.cpu_ns(), loop.time()
            await asyncio.sleep(3.0)
            after = spawned.group.cpu_ns()
            assert before is not None
            assert after is not None
            return (after - before) / 1e9 / (loop.time() - began)

        limiter.set_quota("engine", busy=True)
        low = await used_share()
        assert low < 2 * BUSY / 100
        limiter.set_quota("engine", busy=False)
        assert await used_share() > low


async def test_a_host_without_a_busy_quota_looks_at_nothing() -> None:
    limiter = Limiter(Limits(), {}, freezers.HOST_LEAF)

    def nobody() -> list[EngineLife]:
        pytest.fail("looked")

    await CpuThrottle(limiter).keep(nobody)
