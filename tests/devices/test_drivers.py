"""One contract for all device drivers, and what each of them adds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rose_agent.devices.driver import DeviceDriver, Gpu, GpuProcess, Memory
from rose_agent.devices.errors import NoDevices, QueryFailed, UnknownGpu
from rose_agent.devices.fake_nvml import FakeGpu, FakeMemory, FakeNvml, FakeProcess
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.devices.opening import open_driver
from rose_agent.devices.static import StaticDriver
from rose_core.devices.health import Fitness, FitnessLimits, Vitals, assess

GIB = 1 << 30


def static_driver(tmp_path: Path) -> DeviceDriver:
    file = tmp_path / "gpus.yaml"
    file.write_text(
        f"gpus:\n- {{uuid: GPU-a, memoryBytes: {16 * GIB}, usedBytes: {9 * GIB}, name: small}}\n"
        f"- {{uuid: GPU-b, memoryBytes: {80 * GIB}, usedBytes: 0, refusal: EccErrors}}\n"
    )
    return open_driver("static", file)


def fake_gpus() -> list[FakeGpu]:
    return [
        FakeGpu("GPU-a", FakeMemory(16 * GIB, 9 * GIB), "small", [FakeProcess(11, 9 * GIB)]),
        FakeGpu("GPU-b", FakeMemory(80 * GIB, 0), ecc_errors=3),
    ]


def nvml_driver(_tmp_path: Path) -> DeviceDriver:
    return NvmlDriver.open(FakeNvml(fake_gpus()))


@pytest.fixture(params=[static_driver, nvml_driver])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> DeviceDriver:
    make: Callable[[Path], DeviceDriver] = request.param
    return make(tmp_path)


def test_contract_gpus_are_listed_by_index(driver: DeviceDriver) -> None:
    first, second = driver.gpus()
    assert first == Gpu("GPU-a", 0, "small", 16 * GIB)
    assert (second.uuid, second.index, second.memory_bytes) == ("GPU-b", 1, 80 * GIB)


def test_contract_memory_tells_zero_from_full(driver: DeviceDriver) -> None:
    assert driver.memory("GPU-a") == Memory(16 * GIB, 9 * GIB)
    assert driver.memory("GPU-b").used_bytes == 0


def refusal(driver: DeviceDriver, uuid: str) -> str:
    return assess(Fitness(), driver.vitals(uuid), FitnessLimits(), 0.0).refusal.value


def test_contract_a_sick_gpu_is_refused_by_name(driver: DeviceDriver) -> None:
    assert refusal(driver, "GPU-a") == ""
    assert refusal(driver, "GPU-b") == "EccErrors"


def test_contract_an_unknown_gpu_is_an_error_everywhere(driver: DeviceDriver) -> None:
    for question in (
        driver.memory,
        driver.processes,
        driver.vitals,
        driver.compute_mode,
        driver.multiprocessors,
    ):
        with pytest.raises(UnknownGpu, match="GPU-z"):
            question("GPU-z")


def test_contract_processes_are_a_tuple_or_unknown(driver: DeviceDriver) -> None:
    processes = driver.processes("GPU-a")
    assert processes is None or processes == (GpuProcess(11, 9 * GIB),)


def test_contract_closing_is_possible(driver: DeviceDriver) -> None:
    driver.close()


def test_nvml_merges_mps_clients_and_keeps_unknown_memory_unknown() -> None:
    gpu = FakeGpu("GPU-a", FakeMemory(GIB, 0))
    gpu.processes = [FakeProcess(5, None), FakeProcess(3, 2**64 - 1)]
    gpu.mps_clients = [FakeProcess(5, 7), FakeProcess(9, 1)]
    found = NvmlDriver.open(FakeNvml([gpu])).processes("GPU-a")
    assert found == (GpuProcess(3, None), GpuProcess(5, 7), GpuProcess(9, 1))


def test_nvml_without_any_process_list_is_unknown_not_empty() -> None:
    library = FakeNvml(fake_gpus())
    driver = NvmlDriver.open(library)
    library.unsupported = {"nvmlDeviceGetMPSComputeRunningProcesses"}
    assert driver.processes("GPU-b") == ()
    library.unsupported |= {"nvmlDeviceGetComputeRunningProcesses"}
    assert driver.processes("GPU-b") is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mig": True, "ecc_errors": 1}, "MigEnabled"),
        ({"xids": [79], "ecc_errors": 1}, "XidError"),
        ({"xids": [31]}, ""),
        ({"ecc_errors": 1, "throttle_reasons": 0x40}, "EccErrors"),
        ({"remap_pending": True}, "EccErrors"),
        ({"throttle_reasons": 0x40}, "ThermalThrottling"),
        ({"throttle_reasons": 0x20}, "ThermalThrottling"),
        ({"throttle_reasons": 0x4}, ""),
    ],
)
def test_nvml_health(change: dict[str, int], word: str) -> None:
    gpu = FakeGpu("GPU-a", FakeMemory(GIB, 0), **change)  # type: ignore[arg-type]
    driver = NvmlDriver.open(FakeNvml([gpu]))
    assert refusal(driver, "GPU-a") == word
    vitals = driver.vitals("GPU-a")
    assert (vitals.power_milliwatts, vitals.temperature_celsius) == (300_000, 50)


def test_nvml_faults_are_remembered_for_their_own_gpu() -> None:
    gpus = [FakeGpu("GPU-a", FakeMemory(GIB, 0), xids=[48, 63]), FakeGpu("GPU-b", FakeMemory(1, 0))]
    driver = NvmlDriver.open(FakeNvml(gpus))
    assert driver.vitals("GPU-b").xids == ()
    assert driver.vitals("GPU-a").xids == (48, 63)
    assert driver.vitals("GPU-a").xids == (48, 63), "an event comes once, the fault stays"


def test_nvml_without_fault_events_still_works() -> None:
    library = FakeNvml(fake_gpus())
    library.unsupported = {"nvmlEventSetCreate"}
    assert NvmlDriver.open(library).vitals("GPU-a").xids == ()


@pytest.mark.parametrize(("mode", "word"), [(0, "Default"), (3, "ExclusiveProcess"), (9, "Mode9")])
def test_nvml_compute_mode(mode: int, word: str) -> None:
    gpu = FakeGpu("GPU-a", FakeMemory(GIB, 0), compute_mode=mode)
    assert NvmlDriver.open(FakeNvml([gpu])).compute_mode("GPU-a") == word


def test_nvml_questions_a_gpu_does_not_support_are_unknown() -> None:
    library = FakeNvml(fake_gpus())
    driver = NvmlDriver.open(library)
    library.unsupported = {
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetComputeMode",
    }
    assert driver.vitals("GPU-b") == Vitals()
    assert driver.compute_mode("GPU-b") is None


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"]
)
def test_nvml_failures_are_query_failures(name: str) -> None:
    library = FakeNvml(fake_gpus())
    driver = NvmlDriver.open(library)
    library.fail[name] = library.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(QueryFailed, match="NVML"):
        driver.gpus()


def test_nvml_a_lost_gpu_is_unknown_not_absent() -> None:
    library = FakeNvml(fake_gpus())
    driver = NvmlDriver.open(library)
    library.fail["nvmlDeviceGetHandleByUUID"] = library.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(QueryFailed):
        driver.memory("GPU-a")


def test_nvml_without_a_driver_says_so() -> None:
    library = FakeNvml([])
    library.fail["nvmlInit"] = library.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(NoDevices, match="does not work on this node"):
        NvmlDriver.open(library)


def test_the_stand_in_knows_every_name_that_the_driver_uses() -> None:
    """And each of them, with its value, is the real library's."""
    real = pytest.importorskip("pynvml")
    stand_in = FakeNvml([])
    names = [name for name in dir(stand_in) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 15
    for name in names:
        theirs = getattr(real, name)
        ours = getattr(stand_in, name)
        assert callable(theirs) == callable(ours)
        assert callable(ours) or theirs == ours, name


def test_static_numbers_not_given_are_unknown(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text("gpus: [{uuid: GPU-a, memoryBytes: 5}]\n")
    driver = StaticDriver.open(file)
    assert driver.memory("GPU-a") == Memory(5, None)
    assert driver.processes("GPU-a") is None


def test_static_files_may_change_under_a_running_agent(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text("gpus: [{uuid: GPU-a, memoryBytes: 5}]\n")
    driver = StaticDriver.open(file)
    file.write_text("gpus: [{uuid: GPU-b, memoryBytes: 6}]\n")
    assert [gpu.uuid for gpu in driver.gpus()] == ["GPU-b"]
    file.write_text("gpus: [")
    with pytest.raises(QueryFailed, match=r"gpus\.yaml"):
        driver.gpus()


def test_static_without_a_file_has_no_gpu() -> None:
    assert open_driver("static").gpus() == ()


@pytest.mark.parametrize(
    "text",
    [
        "gpus: [{uuid: a}]",
        "gpus: [{uuid: a, memoryBytes: 0}]",
        "gpus: [{uuid: a, memoryBytes: 1, speed: 9}]",
        "gpus: [{uuid: a, memoryBytes: 1}, {uuid: a, memoryBytes: 1}]",
        "gpus: 7",
        "- a",
    ],
)
def test_static_files_that_are_wrong_are_refused_at_the_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text(text)
    with pytest.raises(NoDevices, match=r"gpus\.yaml"):
        open_driver("static", file)
    with pytest.raises(NoDevices):
        open_driver("static", tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("cores", "capability", "count"),
    [(16_896, (9, 0), 132), (6_912, (8, 0), 108), (16_896, (99, 0), None)],
)
def test_nvml_multiprocessors(cores: int, capability: tuple[int, int], count: int | None) -> None:
    gpu = FakeGpu("GPU-a", FakeMemory(GIB, 0), cores=cores, capability=capability)
    assert NvmlDriver.open(FakeNvml([gpu])).multiprocessors("GPU-a") == count
