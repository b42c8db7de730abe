"""An engine that takes too much of its node harms itself alone; real cgroups where they are."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rose_agent.errors import NoLimits
from rose_agent.host import main
from rose_agent.host.options.arguments import limiter_of, parser
from rose_agent.host.processes import process
from rose_agent.host.processes.classes import fake
from rose_agent.host.processes.launchers import EngineOrder, EngineProgram
from rose_agent.os import freezers, processes
from rose_agent.os.groups import end, wait_for
from rose_agent.os.limits import PROCESSES, CgroupBase, Limiter, Limits
from rose_core.wire.host import EngineState
from tests.host.helpers import guarding, order, serving, status_of, stop, until

MIB = 1 << 20
PREFIX = "rose-test-"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="cgroups and users need root")


def limiter(limits: Limits, prefix: str) -> Limiter:
    try:
        return Limiter.detect(limits, prefix)
    except NoLimits as error:
        pytest.skip(f"no such controller here: {error}")


@asynccontextmanager
async def engine(
    tmp_path: Path, limits: Limits, script: str
) -> AsyncIterator[tuple[process.Spawned, Limiter]]:
    """A Python script as an engine under limits; nothing of it is left afterwards."""
    freezer = freezers.detect("auto", scope=str(tmp_path))
    held = limiter(limits, freezer.prefix)
    program = EngineProgram((sys.executable, "-c", script))
    inside = process.Containment("engine", freezer, tmp_path / "log", limiter=held)
    spawned = await process.spawn(program, inside)
    try:
        yield spawned, held
    finally:
        members = spawned.group.pids()
        assert end(spawned.group, 30.0)
        await spawned.root.wait()
        processes.reap(members)
        held.remove("engine")


FORK_BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


@root_only
async def test_a_fork_bomb_stays_inside_its_limit_and_ends_with_its_engine(tmp_path: Path) -> None:
    async with engine(tmp_path, Limits(pids=24), FORK_BOMB) as (spawned, held):
        assert wait_for(lambda: bool(held.broken("engine")), 30.0)
        assert len(spawned.group.pids()) <= 24
        assert "limit of 24 processes" in held.broken("engine")
    assert spawned.group.pids() == ()


@root_only
async def test_a_memory_hog_is_killed_and_nobody_else(tmp_path: Path) -> None:
    hog = "held = []\nwhile True: held.append(bytearray(4 << 20))"
    async with engine(tmp_path, Limits(memory_bytes=96 * MIB), hog) as (spawned, held):
        assert await spawned.root.wait() == -9
        assert held.broken("engine") == "it was killed at its memory limit of 96 MiB"


@root_only
async def test_shared_memory_is_an_engines_own_and_bounded(tmp_path: Path) -> None:
    script = f"""
import os
assert os.listdir("/dev/shm") == []
with open("/dev/shm/mine", "wb") as file:
    try:
        file.write(bytes({8 * MIB})); file.flush()
    except OSError as error:
        open({str(tmp_path / "said")!r}, "w").write(os.strerror(error.errno))
"""
    async with engine(tmp_path, Limits(shm_bytes=4 * MIB), script) as (spawned, _):
        await spawned.root.wait()
    assert (tmp_path / "said").read_text() == "No space left on device"
    assert "mine" not in os.listdir("/dev/shm")  # noqa: PTH208  # that is the place


@root_only
async def test_the_status_says_which_limit_an_engine_ran_into(rundir: Path, models: Path) -> None:
    arguments = parser().parse_args(
        [
            *("--rundir", str(rundir), "--models", str(models), "--engine-memory-mib", "256"),
            *("--engine-python", sys.executable, "--data-port", "0", "--http-port", "0"),
        ]
    )
    try:
        host = await main.start(arguments, freezers.detect("signals", scope=str(rundir)))
    except NoLimits as error:
        pytest.skip(f"no such controller here: {error}")
    try:
        with guarding(rundir):
            await host.host.ensure(order(kv_bytes=str(600 * MIB)))

            async def failed() -> bool:
                return (await status_of(host)).state is EngineState.FAILED

            await until(failed, "the engine is killed")
            status = await status_of(host)
            assert status.reason == "LimitReached"
            assert "memory limit of 256 MiB" in status.message
    finally:
        await host.stop(0.0)


def _v2(folder: Path, controllers: str) -> Path:
    """A cgroup of the unified hierarchy, as far as files can be one."""
    base = folder / "unified"
    base.mkdir()
    (base / "cgroup.controllers").write_text(controllers)
    (base / "cgroup.subtree_control").write_text("")
    (base / "cgroup.procs").write_text("11\n12\n")
    return base


def test_v2_hands_controllers_down_after_the_host_has_moved_into_a_leaf(tmp_path: Path) -> None:
    base = _v2(tmp_path, "cpu memory pids")
    limits = Limits(memory_bytes=5 * MIB, pids=7, cpu_percent=150)
    found = Limiter.detect(limits, PREFIX, lambda: base, lambda _: None)
    assert (base / "rose-host" / "cgroup.procs").read_text() == "12"
    (folder,) = found.prepare("slot")
    settings = {path.name: path.read_text() for path in folder.iterdir()}
    assert settings == {
        "memory.max": str(5 * MIB),
        "memory.oom.group": "1",
        "pids.max": "7",
        "cpu.max": "150000 100000",
    }


def test_a_host_that_moved_into_its_leaf_still_knows_its_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/pod/rose-host\n")
    (tmp_path / "mountinfo").write_text(
        f"30 24 0:26 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
    )
    assert freezers.own_base(2, tmp_path) == tmp_path / "unified" / "pod"


def test_each_controller_is_used_where_it_is(tmp_path: Path) -> None:
    base = _v2(tmp_path, "pids")
    v1 = tmp_path / "memory"
    v1.mkdir()
    limits = Limits(memory_bytes=MIB, pids=7)
    found = Limiter.detect(
        limits, PREFIX, lambda: base, lambda name: v1 if name == "memory" else None
    )
    assert {folder.parent for folder in found.prepare("slot")} == {base, v1}
    assert (v1 / f"{PREFIX}slot" / "memory.limit_in_bytes").read_text() == str(MIB)


def test_a_limit_that_cannot_be_set_is_refused_by_name() -> None:
    with pytest.raises(NoLimits, match="cpu"):
        Limiter.detect(Limits(cpu_percent=50), PREFIX, lambda: None, lambda _: None)


def oom_score(pid: int) -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text().strip()


BOMB = """
import os, sys, time
if os.fork() == 0:
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.05)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@root_only
async def test_a_fork_bomb_beside_a_real_engine_is_contained_and_goes_with_it(
    rundir: Path, models: Path
) -> None:
    """The engine host, the machine and the next engine do not notice it."""

    def launcher(order: EngineOrder) -> EngineProgram:
        program = fake(order)
        return replace(program, argv=(sys.executable, "-c", BOMB, *program.argv))

    arguments = parser().parse_args(
        [
            *("--rundir", str(rundir), "--models", str(models), "--engine-pids", "48"),
            *("--engine-python", sys.executable, "--data-port", "0", "--http-port", "0"),
        ]
    )
    freezer = freezers.detect("auto", scope=str(rundir))
    limiter(Limits(pids=48), freezer.prefix)
    host = await main.start(arguments, freezer)
    try:
        host.host._site.launchers = {"fake": launcher}
        held = host.host._site.limiter
        with guarding(rundir):
            await host.host.ensure(order())

            async def full() -> bool:
                return bool(held.broken("slot-1"))

            await until(full, "it has run into its limit")
            status = await status_of(host)
            assert len(status.pids) <= 48
            assert set(map(oom_score, status.pids)) == {"1000"}, "first to go without memory"
            assert (await host.host.stop(stop())).state is EngineState.GONE
        host.host._site.launchers = {"fake": fake}
        with guarding(rundir, "slot-2"):
            await host.host.ensure(order("slot-2"))
            await serving(host, "slot-2")
    finally:
        await host.stop(0.0)


def test_engines_have_a_limit_of_processes_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Limits] = []

    def detect(limits: Limits, prefix: str) -> Limiter:
        asked.append(limits)
        if limits.pids:
            raise NoLimits("no pids controller here")
        return Limiter(limits, {}, prefix)

    monkeypatch.setattr(Limiter, "detect", detect)
    limiter_of(parser().parse_args([]), PREFIX)
    assert [one.pids for one in asked] == [PROCESSES, 0]
    with pytest.raises(NoLimits):
        limiter_of(parser().parse_args(["--engine-pids", "64"]), PREFIX)


def test_a_sweep_takes_nothing_of_another_host_or_of_whoever_else_begins_alike(
    tmp_path: Path,
) -> None:
    own, other = (freezers.prefix_of(scope) for scope in ("/run/one", "/run/other"))
    left = {f"{own}slot-1", f"{other}slot-1", "rose-dev", "rose-host"}
    for name in left:
        (tmp_path / name).mkdir()
    Limiter(Limits(pids=1), {"pids": CgroupBase(1, tmp_path)}, own).sweep()
    assert {folder.name for folder in tmp_path.iterdir()} == left - {f"{own}slot-1"}
