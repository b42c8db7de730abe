"""An engine host that is forbidden its GPUs while it runs, as by ``systemctl daemon-reload``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rose_agent.devices import access
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.host import main
from rose_agent.host.discovery import capabilities
from rose_agent.host.discovery.capabilities import Capabilities
from rose_agent.host.sharing.sharing import SharingMeans
from rose_dev.gpu.state import State
from tests.host.helpers import guarding, order, running, serving, stop

CONTROL, UVM = Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm")


class Doors:
    """What the container's cgroup forbids."""

    def __init__(self) -> None:
        self.shut: set[Path] = set()

    def denied(self, files: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path for path in files if path in self.shut)


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Doors:
    made = Doors()
    monkeypatch.setattr(access, "denied", made.denied)
    monkeypatch.setattr(capabilities, "PERIOD_SECONDS", 0.02)
    return made


@pytest.fixture
def able(nvml: State) -> Capabilities:
    driver = NvmlDriver.open()
    assert len(nvml.gpus) == len(driver.gpus())
    return Capabilities(SharingMeans(), driver, 0, Path("/usr/bin/python3"))


async def test_the_loss_is_said_with_the_files_and_what_becomes_of_it(
    able: Capabilities, doors: Doors
) -> None:
    await able.refresh()
    assert "AccessLost" not in able.texts["DeviceAccess"]
    doors.shut = {CONTROL, UVM}
    await able.refresh()
    assert able.texts["DeviceAccess"].startswith("DeviceAccess: AccessLost: ")
    assert "/dev/nvidiactl, /dev/nvidia-uvm any more" in able.texts["DeviceAccess"]


async def test_what_was_forbidden_from_the_beginning_is_not_lost(
    able: Capabilities, doors: Doors
) -> None:
    doors.shut = {CONTROL}
    await able.refresh()
    assert able.lost() == ()
    doors.shut = {CONTROL, UVM}
    assert able.lost() == (UVM,)


async def test_the_host_starts_anew_once_no_engine_serves(
    rundir: Path, models: Path, able: Capabilities, doors: Doors
) -> None:
    ending = asyncio.Event()
    async with running(rundir, models) as host:
        host.abilities = able
        await able.refresh()
        watching = asyncio.create_task(main._stop_without_devices(host, ending))
        with guarding(rundir):
            await host.host.ensure(order())
            await serving(host)
            doors.shut = {CONTROL}
            await asyncio.sleep(0.2)
            assert not ending.is_set(), "an engine that serves has its files open"
            await host.host.stop(stop())
            await asyncio.wait_for(ending.wait(), 30)
        await watching
