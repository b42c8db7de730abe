"""Memory limits of the driver: set before the start, read back, and seen by the engine itself."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rose_agent.devices.driver_limit import MIB, LimitSeen, SmiLimits
from rose_agent.devices.fake_limits import WHOLE_MIB
from rose_agent.errors import QueryFailed
from rose_agent.host import main
from rose_agent.host.processes.classes import fake
from rose_agent.host.processes.launchers import EngineOrder, EngineProgram
from rose_agent.host.sharing.sharing import SharingMeans
from rose_agent.os import freezers
from rose_core.devices.memory import limit_refusal
from rose_core.wire.host import EngineState, EnsureEngine
from rose_core.wire.sync import Sharing
from tests.host.helpers import guarding, order, running, serving, status_of, stop, until
from tests.host.mps_node import GPU, WHOLE

PROGRAM = (sys.executable, "-m", "rose_agent.devices.fake_limits")
STORE = "ROSE_FAKE_LIMITS"
SIZE = 64 * MIB


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in keeps its limits."""
    monkeypatch.setenv(STORE, str(tmp_path / "limits.json"))
    return tmp_path / "limits.json"


@pytest.mark.usefixtures("store")
def test_a_limit_is_read_back_in_the_drivers_words(tmp_path: Path) -> None:
    limits = SmiLimits(lambda: tmp_path, "rose-", PROGRAM)
    folder = limits.folder("slot")
    assert folder == tmp_path / "rose-slot"
    assert limits.get(folder, GPU) == LimitSeen(0, WHOLE_MIB * MIB, 0)
    assert limits.set(folder, GPU, SIZE - 1) == SIZE
    assert limits.get(folder, GPU) == LimitSeen(0, SIZE, 0)
    assert limits.refusal(GPU) == ""


@pytest.mark.usefixtures("store")
def test_a_limit_that_was_taken_and_not_kept_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_FAKE_LIMITS_DEAF", "1")
    limits = SmiLimits(lambda: tmp_path, "rose-", PROGRAM)
    with pytest.raises(QueryFailed, match="handed down"):
        limits.set(limits.folder("slot"), GPU, SIZE)


def test_a_node_that_cannot_says_what_it_lacks(tmp_path: Path) -> None:
    assert "cgroup v2" in SmiLimits(lambda: None, "rose-", PROGRAM).refusal(GPU)
    assert "r615" in SmiLimits(lambda: tmp_path, "rose-", ("/no-such-program",)).refusal(GPU)


@pytest.mark.parametrize(("total", "holds"), [(SIZE, True), (SIZE + 1, False), (None, False)])
def test_a_limit_holds_when_the_engine_sees_no_more(total: int | None, holds: bool) -> None:
    assert (limit_refusal(SIZE, total) == "") is holds


# --- an engine under a limit


def limited_order() -> EnsureEngine:
    plain = order(multiprocessors=str(WHOLE), kv_bytes=str(SIZE))
    sharing = Sharing(memory_limit="Driver")
    engine = msgspec.structs.replace(plain.engine, sharing=sharing)
    return msgspec.structs.replace(plain, engine=engine, gpu_uuids=(GPU,))


def limited(store: Path) -> list[Path]:
    return [Path(one) for one in msgspec.json.decode(store.read_bytes())]


@asynccontextmanager
async def limiting(
    rundir: Path, models: Path, environment: dict[str, str]
) -> AsyncIterator[main.RunningHost]:
    """A host whose engines are limited by the stand-in, in real cgroups of v2."""

    def launcher(order: EngineOrder) -> EngineProgram:
        program = fake(order)
        return replace(program, environment={**program.environment, **environment})

    if os.geteuid() != 0 or freezers.own_base(2) is None:
        pytest.skip("needs root and cgroup v2")
    freezer = freezers.detect("auto", scope=str(rundir))
    async with running(rundir, models, freezer) as host:
        site = host.host._site  # what the flags would have made of it
        site.launchers = {"fake": launcher}
        site.means = SharingMeans(
            limits=SmiLimits(lambda: freezers.own_base(2), freezer.prefix, PROGRAM)
        )
        yield host


async def test_an_engine_sees_its_limit_as_the_whole_gpu(
    rundir: Path, models: Path, store: Path
) -> None:
    async with limiting(rundir, models, {STORE: str(store)}) as host:
        with guarding(rundir):
            await host.host.ensure(limited_order())
            await serving(host)
            (cgroup,) = limited(store)
            assert (cgroup.name.endswith("slot-1"), cgroup.is_dir()) == (True, True)
            assert (await host.host.stop(stop())).state is EngineState.GONE
            assert not cgroup.exists()


async def test_an_engine_outside_its_limit_is_ended(
    rundir: Path, models: Path, store: Path
) -> None:
    async with limiting(rundir, models, {STORE: "/nonexistent"}) as host:
        with guarding(rundir):
            await host.host.ensure(limited_order())

            async def ended() -> bool:
                return (await status_of(host)).reason == "DriverLimitUnavailable"

            await until(ended, "the engine is ended")
            assert "although the driver limits it" in (await status_of(host)).message
            assert limited(store)
