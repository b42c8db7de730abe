"""GPUs through NVIDIA's management library (``nvidia-ml-py``, imported when the driver is opened).

Every NVML error becomes ``QueryFailed`` or ``UnknownGpu``, so callers treat what they asked for as
unknown. A question a GPU does not support is ``None``, not an error. Each GPU has a handle and an
event set of its own, so one that is lost fails alone:

| seen | then |
|---|---|
| a GPU does not answer | it stays listed as it was known; its questions fail, no others |
| it never answered since the library was opened | it has no name: ``silent`` counts it |
| it answered ``GPU is lost``, and answers again | it was reset: its earlier faults are over |
| any GPU fails, for ``REOPEN_SECONDS`` | the library is opened anew; at most every ten minutes |
| no GPU can be counted | the same, with every listing: the driver was loaded anew, or is gone |

Faults (Xid) come as events, which are collected from the moment the library is opened and kept when
it is opened anew.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rose_agent.devices.driver import DriverVersion, Gpu, GpuProcess, Memory
from rose_agent.errors import NoDevices, QueryFailed, UnknownGpu
from rose_core.devices.health import Virtualization, Vitals
from rose_core.uids import GpuUuid

T = TypeVar("T")

# NVML marks "unknown" in an unsigned 64-bit field by all ones.
_UNKNOWN = 2**64 - 1
_KEPT_XIDS = 32
# A GPU that came back answers by itself within seconds; what needs the library opened anew (a
# reset of the GPU, a new driver) takes an operator minutes. Opening it takes a second or more and
# hears no fault meanwhile, so it is tried less and less often while GPUs stay lost.
REOPEN_SECONDS = 30.0
_REOPEN_MOST_SECONDS = 600.0
# An agent that ends does not wait for a GPU that hangs: the kernel closes the library's files.
_CLOSE_SECONDS = 1.0
# Cores of one multiprocessor, by compute capability.
_CORES_EACH = {
    **dict.fromkeys([(7, 0), (7, 2), (7, 5), (8, 0)], 64),
    **dict.fromkeys([(8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)], 128),
}
_COMPUTE_MODES = {0: "Default", 2: "Prohibited", 3: "ExclusiveProcess"}
_VIRTUALIZATION = {2: Virtualization.GUEST, 3: Virtualization.HOST, 4: Virtualization.HOST}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class NvmlDriver:
    """The driver; one thread at a time is inside the library.

    Args:
        library: the module ``pynvml``; initialised already.
        clock: monotonic seconds.
    """

    name = "nvml"

    # nvidia-ml-py ships no types.
    def __init__(
        self,
        library: Any,  # noqa: ANN401  # as above
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = library
        self._clock = clock
        self._lock = threading.RLock()
        self._gpus: dict[GpuUuid, Gpu] = {}
        self._handles: dict[GpuUuid, object] = {}
        self._events: dict[GpuUuid, object] = {}
        self._xids: dict[GpuUuid, tuple[int, ...]] = {}
        self._lost: set[GpuUuid] = set()
        self._silent: dict[int, str] = {}
        self._usable = True
        self._failing_since: float | None = None
        self._reopen_after = REOPEN_SECONDS

    @classmethod
    def open(
        cls,
        library: Any = None,  # noqa: ANN401  # as above
        clock: Callable[[], float] = time.monotonic,
    ) -> NvmlDriver:
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
        driver = cls(library, clock)
        with contextlib.suppress(QueryFailed):
            driver._survey()
        return driver

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU that has ever answered, by index; also finds those that have come back."""
        with self._lock:
            self._survey()
            return tuple(sorted(self._gpus.values(), key=lambda gpu: gpu.index))

    def silent(self) -> tuple[str, ...]:
        """GPUs without a name, since they have not answered yet, each with the reason."""
        return tuple(f"GPU {index}: {why}" for index, why in sorted(self._silent.items()))

    def version(self) -> DriverVersion:
        """Of the driver and its CUDA."""
        with self._lock:
            driver = _text(self._ask(self._nvml.nvmlSystemGetDriverVersion))
            cuda = int(self._ask(self._nvml.nvmlSystemGetCudaDriverVersion_v2))
        return DriverVersion(driver, (cuda // 1000, cuda % 1000 // 10))

    def memory(self, uuid: GpuUuid) -> Memory:
        """Total and used bytes, other users' memory included."""
        with self._asking(uuid) as handle:
            info = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return Memory(int(info.total), int(info.used))

    def processes(self, uuid: GpuUuid) -> tuple[GpuProcess, ...] | None:
        """Compute processes, MPS clients included, each once."""
        found: dict[int, int | None] = {}
        known = False
        nvml = self._nvml
        with self._asking(uuid) as handle:
            for question in (
                nvml.nvmlDeviceGetComputeRunningProcesses,
                nvml.nvmlDeviceGetMPSComputeRunningProcesses,
            ):
                listed = self._optional(question, handle)
                if listed is None:
                    continue
                known = True
                for process in listed:
                    used = process.usedGpuMemory
                    found[int(process.pid)] = None if used in {None, _UNKNOWN} else int(used)
        if not known:
            return None
        return tuple(GpuProcess(pid, used) for pid, used in sorted(found.items()))

    def vitals(self, uuid: GpuUuid) -> Vitals:
        """Slices, memory errors, heat, power, and the faults so far."""
        nvml, ask = self._nvml, self._optional
        with self._asking(uuid) as handle:
            self._collect(uuid)
            mig = ask(nvml.nvmlDeviceGetMigMode, handle)
            rows = ask(nvml.nvmlDeviceGetRemappedRows, handle)
            reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
            virtual = ask(nvml.nvmlDeviceGetVirtualizationMode, handle)
            counted = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            return Vitals(
                mig=mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
                mig_ends=mig is not None and mig[1] != nvml.NVML_DEVICE_MIG_ENABLE,
                virtualization=_VIRTUALIZATION.get(virtual),
                uncorrected_errors=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, *counted),
                remap_pending=None if rows is None else bool(rows[2]),
                thermal=None if reasons is None else bool(reasons & self._thermal),
                power_milliwatts=ask(nvml.nvmlDeviceGetPowerUsage, handle),
                temperature_celsius=ask(
                    nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
                ),
                xids=self._xids.get(uuid, ()),
            )

    def compute_mode(self, uuid: GpuUuid) -> str | None:
        """What NVML says; None on GPUs that have no such mode."""
        with self._asking(uuid) as handle:
            mode = self._optional(self._nvml.nvmlDeviceGetComputeMode, handle)
        return None if mode is None else _COMPUTE_MODES.get(int(mode), f"Mode{int(mode)}")

    def multiprocessors(self, uuid: GpuUuid) -> int | None:
        """From NVML's number of cores; None for a generation whose cores each has is not known."""
        with self._asking(uuid) as handle:
            cores = self._optional(self._nvml.nvmlDeviceGetNumGpuCores, handle)
            generation = self._optional(self._nvml.nvmlDeviceGetCudaComputeCapability, handle)
        if cores is None or generation is None:
            return None
        each = _CORES_EACH.get((int(generation[0]), int(generation[1])))
        return None if each is None else int(cores) // each

    def close(self) -> None:
        """Shut the library down, unless a question hangs in it."""
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            return
        try:
            self._ask(self._nvml.nvmlShutdown)
        finally:
            self._lock.release()

    @property
    def _thermal(self) -> int:
        nvml = self._nvml
        return int(
            nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )

    # --- which GPUs there are, and whether the library has to be opened anew

    def _survey(self) -> None:
        """Find the GPUs that answer, and learn what is new of them.

        Raises:
            QueryFailed: they cannot be counted.
        """
        if not self._usable:
            self._reopen()
        try:
            self._find_all()
        except QueryFailed:
            self._reopen()
            self._find_all()
        if not (self._silent or self._lost):
            self._failing_since, self._reopen_after = None, REOPEN_SECONDS
            return
        now_s = self._clock()
        if self._failing_since is None:
            self._failing_since = now_s
        elif now_s - self._failing_since >= self._reopen_after:
            self._failing_since = now_s
            self._reopen_after = min(2 * self._reopen_after, _REOPEN_MOST_SECONDS)
            self._reopen()
            self._find_all()

    def _find_all(self) -> None:
        known = {gpu.index: gpu.uuid for gpu in self._gpus.values() if gpu.uuid in self._handles}
        count = int(self._ask(self._nvml.nvmlDeviceGetCount))
        self._silent = {index: why for index, why in self._silent.items() if index < count}
        for index in range(count):
            if index in known:
                continue
            try:
                self._find(index)
                self._silent.pop(index, None)
            except QueryFailed as error:
                named = any(gpu.index == index for gpu in self._gpus.values())
                if not named:
                    self._silent[index] = str(error)

    def _find(self, index: int) -> None:
        nvml = self._nvml
        handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = GpuUuid(_text(self._ask(nvml.nvmlDeviceGetUUID, handle)))
        gpu = Gpu(
            uuid=uuid,
            index=index,
            name=_text(self._ask(nvml.nvmlDeviceGetName, handle)),
            memory_bytes=int(self._ask(nvml.nvmlDeviceGetMemoryInfo, handle).total),
            minor=self._optional(nvml.nvmlDeviceGetMinorNumber, handle),
        )
        # A GPU that was replaced takes over its predecessor's index.
        self._gpus = {name: one for name, one in self._gpus.items() if one.index != index}
        self._gpus[uuid] = gpu
        self._handles[uuid] = handle
        self._listen(uuid, handle)

    def _reopen(self) -> None:
        """Open the library anew: handles and event sets of before are void.

        Raises:
            QueryFailed: it does not open; the next survey tries again.
        """
        nvml = self._nvml
        for uuid in tuple(self._events):
            with contextlib.suppress(QueryFailed):
                self._collect(uuid)
        self._handles.clear()
        self._events.clear()
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        self._usable = False
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
                self._xids.clear()  # its next load resets every GPU
            raise QueryFailed(f"NVML does not open: {error}") from error
        self._usable = True

    @contextlib.contextmanager
    def _asking(self, uuid: GpuUuid) -> Iterator[object]:
        """A GPU's handle; notes whether the GPU is lost, or was and has come back."""
        with self._lock:
            handle = self._handle(uuid)
            try:
                yield handle
            except QueryFailed as error:
                if self._is_lost(error):
                    self._lost.add(uuid)
                    self._handles.pop(uuid, None)
                    self._events.pop(uuid, None)
                raise
            if uuid in self._lost:
                self._lost.discard(uuid)
                self._xids.pop(uuid, None)

    def _handle(self, uuid: GpuUuid) -> object:
        known = self._handles.get(uuid)
        if known is not None:
            return known
        nvml = self._nvml
        if not self._usable:
            raise QueryFailed("NVML is not open; the driver may be being loaded anew")
        try:
            handle: object = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            missing = {nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT}
            if error.value in missing and uuid not in self._gpus and not self._silent:
                raise UnknownGpu(f"no GPU {uuid} on this node") from error
            raise QueryFailed(f"NVML: {error}") from error
        self._handles[uuid] = handle
        self._listen(uuid, handle)
        return handle

    def _is_lost(self, error: QueryFailed) -> bool:
        lost = self._nvml.NVML_ERROR_GPU_IS_LOST
        return bool(getattr(error.__cause__, "value", None) == lost)

    # --- faults

    def _listen(self, uuid: GpuUuid, handle: object) -> None:
        """Ask for a GPU's fault events; where NVML has none, faults stay unknown."""
        nvml = self._nvml
        if uuid in self._events:
            return
        with contextlib.suppress(nvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events[uuid] = events

    def _collect(self, uuid: GpuUuid) -> None:
        """Take the events of a GPU that have come, without waiting for more."""
        nvml = self._nvml
        events = self._events.get(uuid)
        while events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(events, 0)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:
                    return
                raise QueryFailed(f"NVML events: {error}") from error
            known = self._xids.get(uuid, ())
            self._xids[uuid] = (*known, int(event.eventData))[-_KEPT_XIDS:]

    # --- questions

    def _ask(self, question: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        try:
            return question(*arguments)
        except self._nvml.NVMLError as error:
            raise QueryFailed(f"NVML {getattr(question, '__name__', '')}: {error}") from error

    def _optional(self, question: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """As ``_ask``; None when this GPU, or the library of this driver, has no such question."""
        nvml = self._nvml
        try:
            return question(*arguments)
        except nvml.NVMLError as error:
            if error.value in {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
                return None
            raise QueryFailed(f"NVML {getattr(question, '__name__', '')}: {error}") from error
