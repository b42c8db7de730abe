"""What a node's GPUs look like from a container, and what a guard does where it is shown none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pynvml
import pytest

from rose_agent.devices import access
from rose_agent.devices.access import (
    ACCESS,
    DRIVER_ROOT,
    LIBRARY,
    AbsentDriver,
    Missing,
    denied,
    diagnose,
    driver_neighbours,
    library_folder,
    located,
)
from rose_agent.devices.opening import open_driver, open_or_idle
from rose_agent.devices.static import StaticDriver
from rose_agent.errors import UnknownGpu
from rose_agent.guard.devices import devices_access
from rose_agent.guard.metrics import DEVICE_ACCESS
from rose_agent.guard.sync import report
from rose_core.identity import GpuUuid
from rose_dev.gpu.library import library
from rose_dev.gpu.state import State
from rose_dev.waiting import until

needs_none = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists(), reason="this machine has a driver of NVIDIA's"
)
GPU, SWITCH = "0x030200", "0x068000"


def node(root: Path, *devices: tuple[str, str], driver: str = "") -> Path:
    """A file system with PCI devices (vendor, class) and perhaps a loaded kernel driver."""
    for number, (vendor, kind) in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:{number:02}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(f"{driver}\nGCC version: 12\n")
    return root


def test_a_node_without_gpus_is_told_from_one_without_a_driver(tmp_path: Path) -> None:
    bare = node(tmp_path / "bare", ("0x8086", GPU), ("0x10de", SWITCH))
    assert diagnose("said", bare, {}, lambda: False).state is Missing.NO_GPU
    new = node(tmp_path / "new", ("0x10de", GPU), ("0x10de", GPU))
    driverless = diagnose("said", new, {}, lambda: False)
    assert driverless.state is Missing.NO_DRIVER
    assert driverless.text.startswith("2 NVIDIA devices")


def test_a_container_that_is_not_shown_the_driver_says_which_way_was_chosen(tmp_path: Path) -> None:
    root = node(tmp_path, ("0x10de", GPU), driver="NVRM version: 550.163.01")
    found = diagnose("said", root, {"ROSE_GPU_ACCESS": "RuntimeClass"}, lambda: False)
    assert found.state is Missing.NO_ACCESS
    assert "550.163.01" in found.text
    assert "gpus.access RuntimeClass" in found.text


@pytest.mark.parametrize(
    "layout",
    ["lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib64"],
)
def test_the_library_is_found_in_every_known_layout(tmp_path: Path, layout: str) -> None:
    assert library_folder(tmp_path) is None
    (tmp_path / layout).mkdir(parents=True)
    (tmp_path / layout / LIBRARY).touch()
    assert library_folder(tmp_path) == tmp_path / layout


def test_two_drivers_are_said_with_both_versions(tmp_path: Path) -> None:
    """As after an upgrade of the packages under a loaded kernel module."""
    reported = str(pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    root = node(tmp_path, ("0x10de", GPU), driver="NVRM version: 535.288.01")
    (root / "proc/self").mkdir()
    lines = [
        "7f00 r--p 00 00:00 1 /usr/lib/libc.so.6",
        "7f01 r-xp /usr/lib/libnvidia-ml.so.550.163.01",
    ]
    (root / "proc/self/maps").write_text("\n".join(lines))
    found = diagnose(reported, root, {}, lambda: True)
    assert found.state is Missing.NVML_FAILS
    assert "the library is 550.163.01, the kernel module NVRM version: 535.288.01" in found.text
    assert "restart the node" in found.text


def test_a_device_file_that_is_missing_or_only_broken_is_not_denied(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    assert denied([tmp_path / "plain", tmp_path / "none"]) == ()


@needs_none
def test_a_guard_without_nvml_is_idle_and_knows_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRIVER_ROOT, raising=False)
    driver = open_or_idle("nvml")
    assert isinstance(driver, AbsentDriver)
    assert driver.gpus() == ()
    assert driver.name == "nvml"  # as with NVML, what is not listed is not lent
    with pytest.raises(UnknownGpu):
        driver.memory(GpuUuid("GPU-a"))


_IDLE = """
import asyncio, contextlib, sys
from rose_agent.devices.opening import open_driver, open_or_idle
from rose_agent.errors import AccessChanged
from rose_agent.guard.devices import devices_access

devices_access.PERIOD_SECONDS = 0.05
driver = open_or_idle("nvml")

async def main():
    try:
        await asyncio.wait_for(devices_access.watch_access(print, print, driver), 20)
    except AccessChanged as error:
        print(f"ended: {error}")

print(len(driver.gpus()), flush=True)
if not driver.gpus():
    asyncio.run(main())
"""


@needs_none
def test_the_driver_of_a_mounted_root_is_used_and_one_that_comes_later_is_noticed(
    tmp_path: Path,
) -> None:
    root = tmp_path / "driver"
    environment = {**os.environ, DRIVER_ROOT: str(root), "LD_LIBRARY_PATH": ""}
    command = [sys.executable, "-c", _IDLE]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as idle:
        assert idle.stdout is not None
        assert idle.stdout.readline() == "0\n"
        assert idle.stdout.readline().startswith(("NoGpu: ", "NoDriver: "))
        install(root)
        assert "a driver has appeared" in idle.stdout.readline()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == "8\n"


@needs_none
async def test_an_idle_guard_says_anew_why_once_the_reason_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's kernel module is loaded later, and the container is shown no library."""
    monkeypatch.delenv(DRIVER_ROOT, raising=False)
    monkeypatch.setattr(devices_access, "PERIOD_SECONDS", 0.01)
    # Another test may have loaded a library of ours in this process.
    nowhere = partial(diagnose, root=tmp_path, is_loadable=lambda: False)
    monkeypatch.setattr(access, "diagnose", nowhere)
    lacks: list[str] = []
    driver = AbsentDriver(nowhere("not found"))
    task = asyncio.create_task(devices_access.watch_access(lacks.append, lacks.append, driver))
    try:
        await until(lambda: bool(lacks))
        module = tmp_path / "proc/driver/nvidia"
        module.mkdir(parents=True)
        (module / "version").write_text("Kernel Module 580\n")
        await until(lambda: len(lacks) > 1)
    finally:
        task.cancel()
    assert [reported.partition(":")[0] for reported in lacks] == ["NoGpu", "NoAccess"]
    shown = {
        sample.labels["state"] for metric in DEVICE_ACCESS.collect() for sample in metric.samples
    }
    assert "NoGpu" not in shown
    assert "NoAccess" in shown
    DEVICE_ACCESS.remove("NoAccess")


def install(root: Path) -> None:
    """The NVML library and its state, as a driver's installation would bring them, at once."""
    made = root.with_name("made") / "usr/lib64"
    made.mkdir(parents=True)
    (made / LIBRARY).write_bytes(library().read_bytes())
    State.create(made / "nvml.state", "h100x8").close()
    made.parents[1].rename(root)


def test_why_the_guard_sees_no_gpu_comes_before_what_its_host_lacks_for_that() -> None:
    reported = report.capabilities({}, "NoAccess: no library", "")
    assert reported == {"DeviceAccess": "DeviceAccess: NoAccess: no library"}
    assert report.capabilities({"DeviceAccess": ""}, "", "") == {"DeviceAccess": ""}
    host = {"DeviceAccess": "DeviceAccess: engines cannot open /dev/nvidia-uvm"}
    assert report.capabilities(host, "NoAccess: no library", "") == reported
    assert report.capabilities(host, "", "") == host


async def test_a_guard_that_sees_its_gpus_goes_on(tmp_path: Path) -> None:
    received: list[str] = []
    static = StaticDriver(tmp_path / "none")
    await asyncio.wait_for(devices_access.watch_access(received.append, received.append, static), 5)
    assert received == []


async def test_a_guard_says_how_many_gpus_it_sees_through_what_and_with_which_driver(
    nvml: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ACCESS, "NRI")
    lacks: list[str] = []
    seen: list[str] = []
    with contextlib.closing(open_driver("nvml")) as driver, contextlib.suppress(TimeoutError):
        await asyncio.wait_for(devices_access.watch_access(lacks.append, seen.append, driver), 1)
    version = nvml.raw.driver_version.decode()
    assert (lacks, seen) == ([], [f"{len(nvml.gpus)} GPUs through NRI, driver {version}"])
    assert report.capabilities({}, "", seen[0])["GpuAccess"] == seen[0]


def test_programs_of_a_mounted_driver_find_its_libraries_and_no_c_library_of_its(
    tmp_path: Path,
) -> None:
    """A driver's container holds a C library as well, which is not this image's."""
    libraries, links = tmp_path / "driver/usr/lib/x86_64-linux-gnu", tmp_path / "links"
    for folder in (libraries, tmp_path / "driver/bin", links):
        folder.mkdir(parents=True)
    for name in (LIBRARY, "libcuda.so.1", "libc.so.6"):
        (libraries / name).touch()
    (tmp_path / "driver/bin/nvidia-cuda-mps-control").touch()
    mounted = {DRIVER_ROOT: str(tmp_path / "driver"), "PATH": "/usr/bin"}
    found = located("nvidia-cuda-mps-control", mounted)
    assert found == str(tmp_path / "driver/bin/nvidia-cuda-mps-control")
    assert located("/own/control", mounted) == "/own/control"
    made = driver_neighbours(links, mounted)
    assert made["LD_LIBRARY_PATH"] == str(links)
    assert {path.name for path in links.iterdir()} == {LIBRARY, "libcuda.so.1"}
    assert str(tmp_path / "driver/bin") in made["PATH"].split(":")[1:]


def test_where_no_driver_is_mounted_programs_run_as_they_are(tmp_path: Path) -> None:
    assert located("nvidia-cuda-mps-control", {}) == "nvidia-cuda-mps-control"
    assert driver_neighbours(tmp_path, {"PATH": "/usr/bin"}) == {"PATH": "/usr/bin"}
    assert not list(tmp_path.iterdir())
