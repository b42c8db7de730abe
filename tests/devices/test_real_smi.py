"""NVIDIA's own ``nvidia-smi``, of the drivers 535 and 550, asks our NVML and agrees with it.

It is an independent reader of NVIDIA's ABI: what it prints was laid out by NVIDIA's compiler. Of
processes it asks a private table (``nvmlInternalGetExportTable``) that no public header describes
and that this library does not have, so processes are held to ``nvidia-ml-py`` alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_dev.cluster.gpu_node.driver_root import SUITES, unpacked
from rose_dev.cluster.gpu_node.failures import act
from rose_dev.errors import NotSupported
from rose_dev.gpu import library
from rose_dev.gpu.profiles import PROFILES
from rose_dev.gpu.state import State
from rose_dev.gpu.testing import require

MIB = 1 << 20


class Smi:
    """The program of one driver, before a state of its own."""

    def __init__(self, program: Path, state: State) -> None:
        self._program, self.state = program, state

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **library.environment(self.state.path)}
        command = [str(self._program), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    def rows(self, *fields: str) -> list[list[str]]:
        """The GPUs' fields, without units."""
        done = self.run(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.split(", ") for line in done.stdout.splitlines()]


@pytest.fixture(params=sorted(SUITES))
def driver(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def smi(driver: int, tmp_path: Path) -> Iterator[Smi]:
    require()
    try:
        program = unpacked("nvidia-smi", driver) / "usr/lib/nvidia/current/nvidia-smi"
    except NotSupported as error:
        pytest.skip(str(error))
    with State.create(tmp_path / "nvml.state", "h100x2", seed="smi") as state:
        yield Smi(program, state)


def test_the_program_is_of_the_driver_that_is_asked_for(driver: int, smi: Smi) -> None:
    assert f"NVIDIA-SMI {driver}." in smi.run().stdout


def test_names_uuids_places_and_versions_agree(smi: Smi) -> None:
    fields = ("index", "name", "uuid", "serial", "pci.bus_id", "driver_version", "compute_mode")
    version = smi.state.raw.driver_version.decode()
    assert smi.rows(*fields) == [
        [
            str(index),
            PROFILES["h100x2"].name,
            gpu.uuid,
            gpu.raw.serial.decode(),
            gpu.raw.bus_id.decode(),
            version,
            "Default",
        ]
        for index, gpu in enumerate(smi.state.gpus)
    ]
    assert f"CUDA Version: {smi.state.raw.cuda_version // 1000}." in smi.run().stdout


def test_memory_agrees_before_and_after_a_process_takes_some(smi: Smi) -> None:
    first, second = smi.state.gpus
    first.start(os.getpid(), 30 << 30)
    total = PROFILES["h100x2"].memory_bytes // MIB
    reserved = PROFILES["h100x2"].reserved_bytes // MIB
    taken = 30 << 10
    fields = ("memory.total", "memory.reserved", "memory.used", "memory.free")
    assert [[int(cell) for cell in row] for row in smi.rows(*fields)] == [
        [total, reserved, taken, total - reserved - taken],
        [total, reserved, 0, total - reserved],
    ]
    second.start(os.getpid(), 1 << 30)
    second.end(os.getpid())
    assert smi.rows("memory.used")[1] == ["0"]


def test_mig_is_seen_on_the_gpu_that_has_it(smi: Smi) -> None:
    act(smi.state, "mig", ["1"])
    assert smi.rows("mig.mode.current", "mig.mode.pending") == [
        ["Disabled", "Disabled"],
        ["Enabled", "Enabled"],
    ]
    assert "No MIG devices found" in smi.run().stdout
    act(smi.state, "restore", ["1"])
    assert smi.rows("mig.mode.current") == [["Disabled"], ["Disabled"]]


def test_the_programs_rows_show_the_faults_of_the_state(smi: Smi) -> None:
    act(smi.state, "ecc", ["0", "3"])
    act(smi.state, "thermal", ["1", "92"])
    fields = (
        "ecc.errors.uncorrected.volatile.total",
        "temperature.gpu",
        "clocks_throttle_reasons.hw_thermal_slowdown",
    )
    assert smi.rows(*fields) == [["3", "34", "Not Active"], ["0", "92", "Active"]]


def test_a_lost_gpu_is_named_and_takes_the_program_down_as_nvidia_has_it(smi: Smi) -> None:
    act(smi.state, "lose", ["1"])
    done = smi.run("-L")
    assert smi.state.gpus[0].uuid in done.stdout
    assert "GPU is lost" in done.stdout + done.stderr


def test_a_vgpu_is_called_one(smi: Smi) -> None:
    act(smi.state, "vgpu", ["0"])
    shown = smi.run("-q", "-i", "0").stdout
    modes = [one for one in shown.splitlines() if one.strip().startswith("Virtualization Mode")]
    assert "VGPU" in [line.partition(":")[2].strip() for line in modes]


def test_two_drivers_are_refused_in_the_words_that_owners_know(smi: Smi) -> None:
    smi.state.fail("nvmlInitWithFlags", 18)
    done = smi.run()
    assert done.returncode == 18
    assert "Failed to initialize NVML: Driver/library version mismatch" in done.stdout


def test_no_driver_is_refused_in_the_words_that_owners_know(smi: Smi) -> None:
    smi.state.unload_driver()
    done = smi.run()
    assert done.returncode == 9
    assert "couldn't communicate with the NVIDIA driver" in done.stdout


def test_its_private_table_is_what_it_asks_of_processes(smi: Smi) -> None:
    """So an empty list there says nothing about ours, which ``test_nvml_library`` has."""
    smi.state.gpus[0].start(os.getpid(), 1 << 30)
    smi.state.forget_calls()
    done = smi.run("--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    assert (done.returncode, done.stdout.strip()) == (0, "")
    assert not [name for name in smi.state.calls() if "RunningProcesses" in name]
