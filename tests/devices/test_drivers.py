"""One contract for all device drivers, and what each of them adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_agent.devices.driver import DeviceDriver, Gpu, GpuProcess, Memory
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.devices.opening import open_driver
from rose_agent.devices.static import StaticDriver
from rose_agent.errors import NoDevices, QueryFailed, UnknownGpu
from rose_core.devices.health import Fitness, FitnessLimits, Virtualization, Vitals, assess
from rose_core.identity import GpuUuid
from rose_dev.gpu import layout
from rose_dev.gpu.state import GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN, VGPU, State, StateGpu
from rose_dev.gpu.state import GpuProcess as Listed

GPU_GPU_A = GpuUuid("GPU-a")
GPU_GPU_B = GpuUuid("GPU-b")

GIB = 1 << 30


def static_driver(tmp_path: Path) -> DeviceDriver:
    file = tmp_path / "gpus.yaml"
    file.write_text(
        f"gpus:\n- {{uuid: GPU-a, memoryBytes: {16 * GIB}, usedBytes: {9 * GIB}, name: small}}\n"
        f"- {{uuid: GPU-b, memoryBytes: {80 * GIB}, usedBytes: 0, refusal: EccErrors}}\n"
    )
    return open_driver("static", file)


@pytest.fixture
def two(nvml: State) -> tuple[StateGpu, StateGpu]:
    """Two GPUs behind NVML: one that is in use, one with memory errors."""
    nvml.raw.gpu_count = 2
    small, sick = nvml.gpus
    small.raw.uuid, small.raw.name, sick.raw.uuid = b"GPU-a", b"small", b"GPU-b"
    small.raw.memory_total, small.raw.memory_used = 16 * GIB, 0
    sick.raw.memory_total, sick.raw.memory_used, sick.raw.ecc_uncorrected = 80 * GIB, 0, 3
    small.start(11, 9 * GIB)
    return small, sick


@pytest.fixture(params=["static", "nvml"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> DeviceDriver:
    if request.param == "static":
        return static_driver(tmp_path)
    request.getfixturevalue("two")
    return open_driver("nvml")


def test_contract_gpus_are_listed_by_index(driver: DeviceDriver) -> None:
    first, second = driver.gpus()
    assert first == Gpu(GPU_GPU_A, 0, "small", 16 * GIB, first.minor)
    assert driver.silent() == ()
    assert (second.uuid, second.index, second.memory_bytes) == ("GPU-b", 1, 80 * GIB)


def test_contract_memory_tells_zero_from_full(driver: DeviceDriver) -> None:
    assert driver.memory(GPU_GPU_A) == Memory(16 * GIB, 9 * GIB)
    assert driver.memory(GPU_GPU_B).used_bytes == 0


def refusal(driver: DeviceDriver, uuid: str) -> str:
    return assess(Fitness(), driver.vitals(GpuUuid(uuid)), FitnessLimits(), 0.0).refusal.value


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
            question(GpuUuid("GPU-z"))


def test_contract_processes_are_a_tuple_or_unknown(driver: DeviceDriver) -> None:
    processes = driver.processes(GPU_GPU_A)
    assert processes is None or processes == (GpuProcess(11, 9 * GIB),)


def test_contract_closing_is_possible(driver: DeviceDriver) -> None:
    driver.close()


def test_nvml_merges_mps_clients_and_keeps_unknown_memory_unknown(
    two: tuple[StateGpu, StateGpu],
) -> None:
    mps = layout.MPS
    two[1].set_processes(
        [Listed(5, None), Listed(3, None), Listed(5, 7, mps), Listed(9, 1, mps)],
    )
    found = open_driver("nvml").processes(GPU_GPU_B)
    assert found == (GpuProcess(3, None), GpuProcess(5, 7), GpuProcess(9, 1))


def test_nvml_without_any_process_list_is_unknown_not_empty(
    nvml: State, two: tuple[StateGpu, StateGpu]
) -> None:
    assert two
    driver = open_driver("nvml")
    nvml.fail("nvmlDeviceGetMPSComputeRunningProcesses_v3", NOT_SUPPORTED)
    assert driver.processes(GPU_GPU_B) == ()
    nvml.fail("nvmlDeviceGetComputeRunningProcesses_v3", NOT_SUPPORTED)
    assert driver.processes(GPU_GPU_B) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mig_current": 1, "ecc_uncorrected": 1}, "MigEnabled"),
        ({"virtualization": VGPU}, "VirtualGpu"),
        ({"virtualization": 1}, ""),
        ({"xid": 79, "ecc_uncorrected": 1}, "XidError"),
        ({"xid": 31}, ""),
        ({"ecc_uncorrected": 1, "throttle_reasons": 0x40}, "EccErrors"),
        ({"remap_pending": 1}, "EccErrors"),
        ({"throttle_reasons": 0x40}, "ThermalThrottling"),
        ({"throttle_reasons": 0x20}, "ThermalThrottling"),
        ({"throttle_reasons": 0x4}, ""),
    ],
)
def test_nvml_refuses_a_gpu_by_the_word_of_its_fault(
    two: tuple[StateGpu, StateGpu], change: dict[str, int], word: str
) -> None:
    gpu = two[0]
    driver = open_driver("nvml")
    for name, value in change.items():
        if name == "xid":
            gpu.fault(value)
        else:
            setattr(gpu.raw, name, value)
    assert refusal(driver, "GPU-a") == word
    vitals = driver.vitals(GPU_GPU_A)
    assert (vitals.power_milliwatts, vitals.temperature_celsius) == (72_000, 34)


def test_nvml_says_how_a_gpu_is_virtual(two: tuple[StateGpu, StateGpu]) -> None:
    driver = open_driver("nvml")
    for mode, meaning in ((VGPU, Virtualization.GUEST), (3, Virtualization.HOST), (1, None)):
        two[0].raw.virtualization = mode
        assert driver.vitals(GPU_GPU_A).virtualization is meaning


def test_nvml_faults_are_remembered_for_their_own_gpu(two: tuple[StateGpu, StateGpu]) -> None:
    driver = open_driver("nvml")
    two[0].fault(48)
    two[0].fault(63)
    assert driver.vitals(GPU_GPU_B).xids == ()
    assert driver.vitals(GPU_GPU_A).xids == (48, 63)
    assert driver.vitals(GPU_GPU_A).xids == (48, 63), "an event comes once, the fault stays"


def test_nvml_without_fault_events_still_works(nvml: State, two: tuple[StateGpu, StateGpu]) -> None:
    nvml.fail("nvmlEventSetCreate", NOT_SUPPORTED)
    driver = open_driver("nvml")
    two[0].fault(48)
    assert driver.vitals(GPU_GPU_A).xids == ()


@pytest.mark.parametrize(("mode", "word"), [(0, "Default"), (3, "ExclusiveProcess"), (9, "Mode9")])
def test_nvml_names_the_compute_mode(two: tuple[StateGpu, StateGpu], mode: int, word: str) -> None:
    two[0].raw.compute_mode = mode
    assert open_driver("nvml").compute_mode(GPU_GPU_A) == word


@pytest.mark.parametrize("code", [NOT_SUPPORTED, 13], ids=["not supported", "older library"])
def test_nvml_questions_without_an_answer_are_unknown(
    nvml: State, two: tuple[StateGpu, StateGpu], code: int
) -> None:
    assert two
    driver = open_driver("nvml")
    for name in (
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetVirtualizationMode",
    ):
        nvml.fail(name, code)
    assert driver.vitals(GPU_GPU_B) == Vitals()
    assert driver.compute_mode(GPU_GPU_B) is None


def test_nvml_says_which_driver_it_is_of(nvml: State) -> None:
    assert nvml.gpus
    version = open_driver("nvml").version()
    assert version is not None
    assert (version.driver, version.cuda) == ("580.95.05", (13, 0))


# --- a GPU that is lost, and a driver that is


def test_nvml_a_lost_gpu_fails_alone_and_stays_listed(nvml: State) -> None:
    driver = open_driver("nvml")
    names = [gpu.uuid for gpu in driver.gpus()]
    nvml.gpus[3].lose()
    assert [gpu.uuid for gpu in driver.gpus()] == names
    for uuid in names:
        if uuid == names[3]:
            with pytest.raises(QueryFailed, match="lost"):
                driver.memory(uuid)
        else:
            assert refusal(driver, uuid) == ""


def test_nvml_a_gpu_that_is_lost_before_the_start_takes_nothing_with_it(nvml: State) -> None:
    nvml.gpus[0].lose()
    driver = open_driver("nvml")
    assert [gpu.index for gpu in driver.gpus()] == [1, 2, 3, 4, 5, 6, 7]
    (silent,) = driver.silent()
    assert "GPU 0" in silent
    assert "lost" in silent
    nvml.gpus[6].fault(48)
    assert refusal(driver, nvml.gpus[6].uuid) == "XidError", "GPUs after the lost one are heard"
    with pytest.raises(QueryFailed):
        driver.memory(GpuUuid(nvml.gpus[0].uuid))
    nvml.gpus[0].recover()
    assert len(driver.gpus()) == 8
    assert driver.silent() == ()


def test_nvml_a_gpu_that_was_reset_has_no_faults_of_before(nvml: State) -> None:
    driver = open_driver("nvml")
    gpu = nvml.gpus[2]
    gpu.fault(48)
    assert refusal(driver, gpu.uuid) == "XidError"
    gpu.lose()
    with pytest.raises(QueryFailed):
        driver.vitals(GpuUuid(gpu.uuid))
    gpu.recover()
    driver.gpus()
    driver.memory(GpuUuid(gpu.uuid))
    assert refusal(driver, gpu.uuid) == ""
    gpu.fault(95)
    assert driver.vitals(GpuUuid(gpu.uuid)).xids == (95,), "it is listened to again"


def test_nvml_a_question_that_fails_once_forgives_no_fault(nvml: State) -> None:
    driver = open_driver("nvml")
    gpu = nvml.gpus[2]
    gpu.fault(48)
    assert refusal(driver, gpu.uuid) == "XidError"
    nvml.fail("nvmlDeviceGetMemoryInfo", UNKNOWN)
    with pytest.raises(QueryFailed):
        driver.memory(GpuUuid(gpu.uuid))
    nvml.fail("nvmlDeviceGetMemoryInfo", 0)
    driver.memory(GpuUuid(gpu.uuid))
    assert refusal(driver, gpu.uuid) == "XidError"


def test_nvml_works_again_after_the_driver_was_loaded_anew(nvml: State) -> None:
    driver = open_driver("nvml")
    nvml.gpus[1].fault(48)
    assert refusal(driver, nvml.gpus[1].uuid) == "XidError"
    nvml.unload_driver()
    with pytest.raises(QueryFailed, match="Driver Not Loaded"):
        driver.gpus()
    with pytest.raises(QueryFailed):
        driver.memory(GpuUuid(nvml.gpus[1].uuid))
    nvml.load_driver()
    assert len(driver.gpus()) == 8
    assert refusal(driver, nvml.gpus[1].uuid) == "", "every GPU was reset"
    nvml.gpus[1].fault(79)
    assert refusal(driver, nvml.gpus[1].uuid) == "XidError"


def test_nvml_that_loses_its_device_files_keeps_the_faults_it_knows(nvml: State) -> None:
    """As after a ``systemctl daemon-reload``: "Unknown Error", but no GPU was reset."""
    driver = open_driver("nvml")
    nvml.gpus[1].fault(48)
    assert refusal(driver, nvml.gpus[1].uuid) == "XidError"
    nvml.fail("nvmlDeviceGetCount_v2", UNKNOWN)
    nvml.fail("nvmlInitWithFlags", UNKNOWN)
    with pytest.raises(QueryFailed, match="Unknown Error"):
        driver.gpus()
    nvml.fail("nvmlDeviceGetCount_v2", 0)
    nvml.fail("nvmlInitWithFlags", 0)
    assert len(driver.gpus()) == 8
    assert refusal(driver, nvml.gpus[1].uuid) == "XidError"


def test_nvml_is_opened_anew_ever_less_often_while_a_gpu_stays_lost(nvml: State) -> None:
    now = 0.0
    driver = NvmlDriver.open(clock=lambda: now)
    nvml.gpus[3].lose()
    with pytest.raises(QueryFailed):
        driver.memory(GpuUuid(nvml.gpus[3].uuid))
    for _ in range(7200):
        driver.gpus()
        now += 1.0
    opened = nvml.calls()["nvmlInitWithFlags"] - 1
    assert 5 <= opened <= 20, "30 s, doubled up to ten minutes, over two hours"
    nvml.gpus[5].fault(48)
    assert refusal(driver, nvml.gpus[5].uuid) == "XidError"


def test_nvml_counts_gpus_of_a_driver_that_does_not_name_one(nvml: State) -> None:
    nvml.fail("nvmlDeviceGetUUID", GPU_IS_LOST)
    driver = open_driver("nvml")
    assert (driver.gpus(), len(driver.silent())) == ((), 8)


def test_nvml_without_a_driver_says_so(nvml: State) -> None:
    nvml.unload_driver()
    with pytest.raises(NoDevices, match="does not work on this node: Driver Not Loaded"):
        NvmlDriver.open()


def test_static_numbers_not_given_are_unknown(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text("gpus: [{uuid: GPU-a, memoryBytes: 5}]\n")
    driver = StaticDriver.open(file)
    assert driver.memory(GPU_GPU_A) == Memory(5, None)
    assert driver.processes(GPU_GPU_A) is None


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
def test_nvml_counts_multiprocessors_by_the_cores_of_each(
    two: tuple[StateGpu, StateGpu], cores: int, capability: tuple[int, int], count: int | None
) -> None:
    raw = two[0].raw
    raw.cores, raw.capability_major, raw.capability_minor = cores, *capability
    assert open_driver("nvml").multiprocessors(GPU_GPU_A) == count
