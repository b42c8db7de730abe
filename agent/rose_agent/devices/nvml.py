"""GPUs through NVIDIA's management library (``nvidia-ml-py``, imported when the driver is opened).

Every NVML error becomes ``QueryFailed`` or ``UnknownGpu``, so callers treat what they asked for as
unknown. A question a GPU does not support is ``None``, not an error. MIG is refused by name:
a slice's processes and memory are not those of the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from rose_agent.devices.driver import Gpu, GpuProcess, Health, Memory
from rose_agent.devices.errors import NoDevices, QueryFailed, UnknownGpu

T = TypeVar("T")

# NVML marks "unknown" in an unsigned 64-bit field by all ones.
_UNKNOWN = 2**64 - 1


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
        return cls(library)

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

    def health(self, uuid: str) -> Health:
        """MIG, uncorrected ECC errors, thermal slowdown, in that order."""
        handle = self._handle(uuid)
        nvml = self._nvml
        return Health(
            refusal=self._refusal(handle),
            power_milliwatts=self._optional(nvml.nvmlDeviceGetPowerUsage, handle),
            temperature_celsius=self._optional(
                nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
        )

    def close(self) -> None:
        """Shut the library down."""
        self._ask(self._nvml.nvmlShutdown)

    def _refusal(self, handle: object) -> str:
        nvml = self._nvml
        mig = self._optional(nvml.nvmlDeviceGetMigMode, handle)
        if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            return "MigEnabled"
        errors = self._optional(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        if errors:
            return "EccErrors"
        reasons = self._optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        thermal = (
            nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )
        return "ThermalThrottling" if reasons & thermal else ""

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
