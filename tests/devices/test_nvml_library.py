"""The NVML library of our own, asked through the real nvidia-ml-py: it answers as NVIDIA's does."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose_dev.errors import DevelopmentError, NotSupported
from rose_dev.gpu import __main__ as shell
from rose_dev.gpu import layout, library
from rose_dev.gpu.profiles import PROFILES
from rose_dev.gpu.state import DRIVER_NOT_LOADED, GpuProcess, State

GIB = 1 << 30
pynvml: Any = importlib.import_module("pynvml")


@pytest.fixture
def handles(nvml: State) -> list[Any]:
    """Of every GPU, after ``nvmlInit``."""
    pynvml.nvmlInit()
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(len(nvml.gpus))]


def code_of(question: Callable[..., object], *arguments: object) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        question(*arguments)
    return int(caught.value.value)


def pids(handle: object) -> list[int]:
    return [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def in_a_new_process(state: Path, code: str) -> object:
    """What a process with the library on its path prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, pynvml\n{code}"],
        env={**os.environ, **library.environment(state)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_a_gpu_is_found_by_each_of_its_names(nvml: State, handles: list[Any]) -> None:
    third = nvml.gpus[3]
    bus = pynvml.nvmlDeviceGetPciInfo(handles[3]).busId
    for found in (
        pynvml.nvmlDeviceGetHandleByUUID(third.uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId(bus),
        pynvml.nvmlDeviceGetHandleBySerial(pynvml.nvmlDeviceGetSerial(handles[3])),
    ):
        assert pynvml.nvmlDeviceGetIndex(found) == 3
        assert pynvml.nvmlDeviceGetUUID(found) == third.uuid
    assert pynvml.nvmlDeviceGetMinorNumber(handles[3]) == 3


def test_names_that_do_not_exist_are_refused_as_the_real_library_does(handles: list[Any]) -> None:
    count = len(handles)
    assert code_of(pynvml.nvmlDeviceGetHandleByIndex, count) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceGetHandleByUUID, "GPU-none") == pynvml.NVML_ERROR_NOT_FOUND


@pytest.mark.parametrize("name", list(PROFILES))
def test_each_profile_is_the_machine_it_is_named_after(tmp_path: Path, name: str) -> None:
    profile = PROFILES[name]
    with State.create(tmp_path / "state", name) as state:
        assert len(state.gpus) == profile.count == int(name.rpartition("x")[2])
        assert len({gpu.uuid for gpu in state.gpus}) == profile.count
        assert {gpu.raw.memory_total for gpu in state.gpus} == {profile.memory_bytes}


def test_both_versions_of_memory_agree_on_what_is_free(nvml: State, handles: list[Any]) -> None:
    nvml.gpus[0].start(7, 40 * GIB)
    old = pynvml.nvmlDeviceGetMemoryInfo(handles[0])
    new = pynvml.nvmlDeviceGetMemoryInfo(handles[0], version=pynvml.nvmlMemory_v2)
    assert (old.total, old.free) == (new.total, new.free)
    assert old.used == new.used + new.reserved
    assert new.used == 40 * GIB


def test_processes_are_listed_by_kind_and_unknown_memory_stays_unknown(
    nvml: State, handles: list[Any]
) -> None:
    both = layout.COMPUTE | layout.GRAPHICS
    nvml.gpus[1].set_processes(
        [GpuProcess(11, GIB, both), GpuProcess(12, None), GpuProcess(13, 5, layout.MPS)]
    )
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handles[1])
    assert [(one.pid, one.usedGpuMemory) for one in listed] == [(11, GIB), (12, None)]
    assert [p.pid for p in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handles[1])] == [11]
    assert [p.pid for p in pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handles[1])] == [13]
    assert pids(handles[0]) == []


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_a_list_that_is_too_small_is_refused_with_the_size_it_needs(
    nvml: State, handles: list[Any], version: str
) -> None:
    ask = pynvml._nvmlGetFunctionPointer(f"nvmlDeviceGetComputeRunningProcesses{version}")
    size = ctypes.c_uint(0)
    assert ask(handles[0], ctypes.byref(size), None) == pynvml.NVML_SUCCESS
    nvml.gpus[0].set_processes([GpuProcess(pid, GIB) for pid in (4, 5, 6)])
    assert ask(handles[0], ctypes.byref(size), None) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert size.value == 3
    room = (pynvml.c_nvmlProcessInfo_v2_t * 3)()
    size.value = 2
    refused = ask(handles[0], ctypes.byref(size), room)
    assert (refused, size.value) == (pynvml.NVML_ERROR_INSUFFICIENT_SIZE, 3)
    assert ask(handles[0], ctypes.byref(size), room) == pynvml.NVML_SUCCESS
    assert room[0].pid == 4


def test_a_list_may_grow_between_two_questions(nvml: State, handles: list[Any]) -> None:
    for count in (1, 40, layout.MOST_PROCESSES):
        nvml.gpus[0].set_processes([GpuProcess(pid, 1) for pid in range(1, count + 1)])
        assert pids(handles[0]) == list(range(1, count + 1))


def test_faults_come_as_events_once_each_to_who_listens_from_before(
    nvml: State, handles: list[Any]
) -> None:
    nvml.gpus[2].fault(13)
    events = pynvml.nvmlEventSetCreate()
    for handle in handles:
        kind = pynvml.nvmlEventTypeXidCriticalError
        pynvml.nvmlDeviceRegisterEvents(handle, kind, events)
    nvml.gpus[2].fault(48)
    nvml.gpus[5].fault(63)
    received = [pynvml.nvmlEventSetWait_v2(events, 0) for _ in range(2)]
    assert [(pynvml.nvmlDeviceGetIndex(one.device), one.eventData) for one in received] == [
        (2, 48),
        (5, 63),
    ]
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 1) == pynvml.NVML_ERROR_TIMEOUT
    pynvml.nvmlEventSetFree(events)


def test_a_lost_gpu_fails_alone(nvml: State, handles: list[Any]) -> None:
    nvml.gpus[3].lose()
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    for question in (
        pynvml.nvmlDeviceGetUUID,
        pynvml.nvmlDeviceGetMemoryInfo,
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetMigMode,
    ):
        assert code_of(question, handles[3]) == lost
        question(handles[2])
    assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 3) == lost
    assert pynvml.nvmlDeviceGetCount() == len(handles)
    nvml.gpus[3].recover()
    assert pynvml.nvmlDeviceGetUUID(handles[3]) == nvml.gpus[3].uuid


def test_a_driver_that_was_loaded_anew_wants_to_be_initialised_anew(
    nvml: State, handles: list[Any]
) -> None:
    nvml.unload_driver()
    assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNKNOWN
    nvml.load_driver(PROFILES["h100x8"].with_driver("580.95.05"))
    assert code_of(pynvml.nvmlDeviceGetUUID, handles[0]) == pynvml.NVML_ERROR_UNKNOWN
    pynvml.nvmlShutdown()
    assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInit()
    assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13_000


def test_what_it_does_not_offer_is_not_supported_and_counted(
    nvml: State, handles: list[Any]
) -> None:
    asked = code_of(pynvml.nvmlDeviceGetEncoderUtilization, handles[0])
    assert asked == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert nvml.calls()["nvmlDeviceGetEncoderUtilization"] == 1


def test_calls_of_all_processes_are_counted_by_name(nvml: State) -> None:
    asked = "pynvml.nvmlInit(); print(json.dumps(pynvml.nvmlDeviceGetCount()))"
    assert in_a_new_process(nvml.path, asked) == 8
    pynvml.nvmlInit()
    pynvml.nvmlDeviceGetCount()
    assert nvml.calls() == {"nvmlInitWithFlags": 2, "nvmlDeviceGetCount_v2": 2}
    nvml.forget_calls()
    assert (nvml.calls(), nvml.total_calls) == ({}, 0)


def test_a_function_can_be_made_to_fail_and_to_work_again(nvml: State, handles: list[Any]) -> None:
    nvml.fail("nvmlDeviceGetName", 999)
    assert code_of(pynvml.nvmlDeviceGetName, handles[0]) == 999
    nvml.fail("nvmlDeviceGetName", 0)
    assert pynvml.nvmlDeviceGetName(handles[0]) == PROFILES["h100x8"].name


def test_without_a_state_there_is_no_driver(nvml: State, tmp_path: Path) -> None:
    code = (
        "try:\n    pynvml.nvmlInit()\nexcept pynvml.NVMLError as error:\n"
        "    print(json.dumps(error.value))"
    )
    assert nvml.gpus
    assert in_a_new_process(tmp_path / "missing", code) == DRIVER_NOT_LOADED
    (tmp_path / "short").write_bytes(b"short")
    assert in_a_new_process(tmp_path / "short", code) == DRIVER_NOT_LOADED


def test_one_folder_with_library_and_state_is_enough_for_a_container(tmp_path: Path) -> None:
    try:
        built = library.library()
    except NotSupported as error:
        pytest.skip(f"NVML library: {error}")
    folder = tmp_path / "mounted"
    folder.mkdir()
    (folder / library.SONAME).write_bytes(built.read_bytes())
    with State.create(folder / "nvml.state", "h100x2"):
        environment = {k: v for k, v in os.environ.items() if k != library.STATE}
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import pynvml as p; p.nvmlInit(); print(p.nvmlDeviceGetCount())",
            ],
            env={**environment, "LD_LIBRARY_PATH": str(folder)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    assert done.stdout == "2\n"


def test_a_state_of_other_names_is_refused(nvml: State) -> None:
    nvml.raw.names += 1
    with pytest.raises(DevelopmentError, match="create it anew"):
        State.open(nvml.path)


def test_every_name_that_nvidias_binding_may_ask_for_is_there(nvml: State) -> None:
    loaded = ctypes.CDLL(str(library.library()))
    missing = [name for name in layout.function_names() if not hasattr(loaded, name)]
    assert (missing, len(nvml.raw.functions)) == ([], layout.MOST_FUNCTIONS)


def test_a_shell_changes_what_a_running_process_hears(
    nvml: State, handles: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(nvml.path)
    assert shell.main(["set", state, "2", "temperature=91"]) == 0
    assert pynvml.nvmlDeviceGetTemperature(handles[2], 0) == 91
    assert shell.main(["start", state, nvml.gpus[2].uuid, "77", "4096"]) == 0
    assert pids(handles[2]) == [77]
    assert shell.main(["lose", state, "2"]) == 0
    assert code_of(pynvml.nvmlDeviceGetUUID, handles[2]) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert shell.main(["calls", state]) == 0
    assert "nvmlDeviceGetUUID" in capsys.readouterr().out
    assert shell.main(["set", state, "9", "temperature=91"]) == 1
    assert "no GPU '9'" in capsys.readouterr().err
