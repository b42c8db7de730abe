"""GPUs through NVIDIA's management library (``nvidia-ml-py``, imported when the driver is opened).

Every NVML error becomes ``QueryFailed`` or ``UnknownGpu``, so callers treat what they asked for as
unknown. A question a GPU does not support is ``None``, not an error. Faults (Xid) come as events,
which are collected from the moment the driver is opened.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from rose_agent.devices.driver import Gpu, GpuProcess, Memory
from rose_agent.devices.errors import NoDevices, QueryFailed, UnknownGpu
from rose_core.devices.health import Vitals

T = TypeVar("T")

# NVML marks "unknown" in an unsigned 64-bit field by all ones.
_UNKNOWN = 2**64 - 1
_KEPT_XIDS = 32
# Cores of one multiprocessor, by compute capability.
_CORES_EACH = {
    **dict.fromkeys([(7, 0), (7, 2), (7, 5), (8, 0)], 64),
    **dict.fromkeys([(8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)], 128),
}
_COMPUTE_MODES = {0: "Default", 2: "Prohibited", 3: "ExclusiveProcess"}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class NvmlDriver:
    """The driver.

    Args:
        library: the module ``pynvml``, or something with the same functions (``fake_nvml``);
            initialised already.
    """

    name = "nvml"

    # nvidia-ml-py ships no types and is replaced by a stand-in in tests.
    def __init__(self, library: Any) -> None:  # noqa: ANN401
        self._nvml = library
        self._xids: dict[str, tuple[int, ...]] = {}
        self._events: object = None

    @classmethod
    def open(cls, library: Any = None) -> NvmlDriver:  # noqa: ANN401  # as above
        """Initialise the library and make the driver.

        Raises:
            NoDevices: no NVIDIA driver here, or it is broken; says why.
        """
        if library is None:
            try:
                library = importlib.import_module("pynvml")
            except ModuleNotFoundError as error:
                raise NoDevices("nvidia-ml-py is missing; install rose-gpu[agent]") from error
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise NoDevices(f"NVML does not work on this node: {error}") from error
        driver = cls(library)
        driver._listen()
        return driver

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU, by index."""
        count = self._ask(self._nvml.nvmlDeviceGetCount)
        return tuple(self._gpu(index) for index in range(count))

    def memory(self, uuid: str) -> Memory:
        """Total and used bytes, other users' memory included."""
        info = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, self._handle(uuid))
        return Memory(int(info.total), int(info.used))

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """Compute processes, MPS clients included, each once."""
        handle = self._handle(uuid)
        found: dict[int, int | None] = {}
        known = False
        for name in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetMPSComputeRunningProcesses",
        ):
            listed = self._optional(getattr(self._nvml, name), handle)
            if listed is None:
                continue
            known = True
            for process in listed:
                used = process.usedGpuMemory
                found[int(process.pid)] = None if used in {None, _UNKNOWN} else int(used)
        if not known:
            return None
        return tuple(GpuProcess(pid, used) for pid, used in sorted(found.items()))

    def vitals(self, uuid: str) -> Vitals:
        """Slices, memory errors, heat, power, and the faults so far."""
        handle = self._handle(uuid)
        nvml = self._nvml
        self._collect()
        mig = self._optional(nvml.nvmlDeviceGetMigMode, handle)
        rows = self._optional(nvml.nvmlDeviceGetRemappedRows, handle)
        reasons = self._optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return Vitals(
            mig=mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
            uncorrected_errors=self._optional(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remap_pending=None if rows is None else bool(rows[2]),
            thermal=None if reasons is None else bool(reasons & self._thermal),
            power_milliwatts=self._optional(nvml.nvmlDeviceGetPowerUsage, handle),
            temperature_celsius=self._optional(
                nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            xids=self._xids.get(uuid, ()),
        )

    def compute_mode(self, uuid: str) -> str | None:
        """What NVML says; None on GPUs that have no such mode."""
        mode = self._optional(self._nvml.nvmlDeviceGetComputeMode, self._handle(uuid))
        return None if mode is None else _COMPUTE_MODES.get(int(mode), f"Mode{int(mode)}")

    def multiprocessors(self, uuid: str) -> int | None:
        """From NVML's number of cores; None for a generation whose cores each has is not known."""
        handle = self._handle(uuid)
        cores = self._optional(self._nvml.nvmlDeviceGetNumGpuCores, handle)
        generation = self._optional(self._nvml.nvmlDeviceGetCudaComputeCapability, handle)
        if cores is None or generation is None:
            return None
        each = _CORES_EACH.get((int(generation[0]), int(generation[1])))
        return None if each is None else int(cores) // each

    def close(self) -> None:
        """Shut the library down."""
        self._ask(self._nvml.nvmlShutdown)

    @property
    def _thermal(self) -> int:
        nvml = self._nvml
        return int(
            nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )

    def _listen(self) -> None:
        """Ask for fault events of every GPU; where NVML has none, faults stay unknown."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(
                    handle, nvml.nvmlEventTypeXidCriticalError, self._events
                )

    def _collect(self) -> None:
        """Take the events that have come, without waiting for more."""
        nvml = self._nvml
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:
                    return
                raise QueryFailed(f"NVML events: {error}") from error
            uuid = _text(self._ask(nvml.nvmlDeviceGetUUID, event.device))
            known = self._xids.get(uuid, ())
            self._xids[uuid] = (*known, int(event.eventData))[-_KEPT_XIDS:]

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
        return Gpu(
            uuid=_text(self._ask(nvml.nvmlDeviceGetUUID, handle)),
            index=index,
            name=_text(self._ask(nvml.nvmlDeviceGetName, handle)),
            memory_bytes=int(self._ask(nvml.nvmlDeviceGetMemoryInfo, handle).total),
        )

    def _handle(self, uuid: str) -> object:
        try:
            handle: object = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            if error.value in {
                self._nvml.NVML_ERROR_NOT_FOUND,
                self._nvml.NVML_ERROR_INVALID_ARGUMENT,
            }:
                raise UnknownGpu(f"no GPU {uuid} on this node") from error
            raise QueryFailed(f"NVML: {error}") from error
        return handle

    def _ask(self, question: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        try:
            return question(*arguments)
        except self._nvml.NVMLError as error:
            raise QueryFailed(f"NVML {getattr(question, '__name__', '')}: {error}") from error

    def _optional(self, question: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """As ``_ask``; None when this GPU does not support the question."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise QueryFailed(f"NVML {getattr(question, '__name__', '')}: {error}") from error
