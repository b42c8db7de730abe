"""A stand-in for the module ``pynvml``: the functions ROSE calls, over GPUs held in memory.

Same names, same error codes, same shapes as ``nvidia-ml-py``, so ``nvml.NvmlDriver`` runs on it
unchanged. A fault of a GPU is an Xid in its ``xids``, delivered once as an event. Faults of NVML
are set by test or by trial: ``fail`` makes a function raise, ``unsupported`` makes a question
unsupported.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class NVMLError(Exception):
    """As in ``pynvml``: ``value`` is the error's code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeMemory:
    """``nvmlMemory_t``, bytes."""

    total: int
    used: int


@dataclass
class FakeProcess:
    """``nvmlProcessInfo_t``."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815  # NVML's spelling


@dataclass
class FakeGpu:
    """One GPU; change its fields to change what NVML says."""

    uuid: str
    memory: FakeMemory
    name: str = "Fake GPU"
    processes: list[FakeProcess] = field(default_factory=list)
    mps_clients: list[FakeProcess] = field(default_factory=list)
    mig: bool = False
    ecc_errors: int = 0
    throttle_reasons: int = 0
    power_milliwatts: int = 300_000
    temperature_celsius: int = 50
    remap_pending: bool = False
    compute_mode: int = 0
    cores: int = 16_896
    capability: tuple[int, int] = (9, 0)
    xids: list[int] = field(default_factory=list)


@dataclass
class FakeEvent:
    """``nvmlEventData_t``."""

    device: FakeGpu
    eventData: int  # noqa: N815  # NVML's spelling


class FakeNvml:
    """What ``import pynvml`` would give."""

    NVMLError = NVMLError
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815  # NVML's spelling
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20  # noqa: N815  # NVML's spelling
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N815  # as above

    def __init__(self, gpus: list[FakeGpu]) -> None:
        self.devices = gpus
        self.fail: dict[str, int] = {}
        self.unsupported: set[str] = set()
        self._initialised = False

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's spelling, here and below
        """Initialise."""
        if code := self.fail.get("nvmlInit"):
            raise NVMLError(code)
        self._initialised = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Shut down."""
        self._check("nvmlShutdown")
        self._initialised = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Number of GPUs."""
        self._check("nvmlDeviceGetCount")
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        """A GPU's handle is the GPU itself."""
        self._check("nvmlDeviceGetHandleByIndex")
        if not 0 <= index < len(self.devices):
            raise NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        """Find by UUID."""
        self._check("nvmlDeviceGetHandleByUUID")
        for gpu in self.devices:
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        """UUID."""
        self._check("nvmlDeviceGetUUID")
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        """Product name."""
        self._check("nvmlDeviceGetName")
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> FakeMemory:  # noqa: N802
        """Total and used bytes."""
        self._check("nvmlDeviceGetMemoryInfo")
        return gpu.memory

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[FakeProcess]:  # noqa: N802
        """Compute processes."""
        self._check("nvmlDeviceGetComputeRunningProcesses")
        return list(gpu.processes)

    def nvmlDeviceGetMPSComputeRunningProcesses(  # noqa: N802
        self, gpu: FakeGpu
    ) -> list[FakeProcess]:
        """MPS clients."""
        self._check("nvmlDeviceGetMPSComputeRunningProcesses")
        return list(gpu.mps_clients)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        """Current and pending mode."""
        self._check("nvmlDeviceGetMigMode")
        return [int(gpu.mig), int(gpu.mig)]

    def nvmlDeviceGetTotalEccErrors(  # noqa: N802
        self, gpu: FakeGpu, _kind: int, _counter: int
    ) -> int:
        """Uncorrected errors since the driver was loaded."""
        self._check("nvmlDeviceGetTotalEccErrors")
        return gpu.ecc_errors

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        """Bit mask."""
        self._check("nvmlDeviceGetCurrentClocksThrottleReasons")
        return gpu.throttle_reasons

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        """Milliwatts."""
        self._check("nvmlDeviceGetPowerUsage")
        return gpu.power_milliwatts

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, _sensor: int) -> int:  # noqa: N802
        """Degrees Celsius."""
        self._check("nvmlDeviceGetTemperature")
        return gpu.temperature_celsius

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        """Corrected, uncorrected, pending, failed."""
        self._check("nvmlDeviceGetRemappedRows")
        return [0, 0, int(gpu.remap_pending), 0]

    def nvmlDeviceGetVirtualizationMode(self, gpu: FakeGpu) -> int:  # noqa: ARG002, N802
        """Bare metal."""
        self._check("nvmlDeviceGetVirtualizationMode")
        return 0

    def nvmlDeviceGetMinorNumber(self, gpu: FakeGpu) -> int:  # noqa: N802
        """That of ``/dev/nvidiaN``."""
        self._check("nvmlDeviceGetMinorNumber")
        return self.devices.index(gpu)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        """The driver."""
        self._check("nvmlSystemGetDriverVersion")
        return "550.163.01"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        """12.4."""
        self._check("nvmlSystemGetCudaDriverVersion_v2")
        return 12_040

    def nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> int:  # noqa: N802
        """0 default, 2 prohibited, 3 exclusive process."""
        self._check("nvmlDeviceGetComputeMode")
        return gpu.compute_mode

    def nvmlDeviceGetNumGpuCores(self, gpu: FakeGpu) -> int:  # noqa: N802
        """All multiprocessors' cores together."""
        self._check("nvmlDeviceGetNumGpuCores")
        return gpu.cores

    def nvmlDeviceGetCudaComputeCapability(  # noqa: N802
        self, gpu: FakeGpu
    ) -> list[int]:
        """Major and minor."""
        self._check("nvmlDeviceGetCudaComputeCapability")
        return list(gpu.capability)

    def nvmlEventSetCreate(self) -> list[FakeGpu]:  # noqa: N802
        """An event set: the GPUs it listens to."""
        self._check("nvmlEventSetCreate")
        return []

    def nvmlDeviceRegisterEvents(  # noqa: N802
        self, gpu: FakeGpu, _kinds: int, events: list[FakeGpu]
    ) -> None:
        """Listen to a GPU."""
        self._check("nvmlDeviceRegisterEvents")
        events.append(gpu)

    def nvmlEventSetWait_v2(  # noqa: N802
        self, events: list[FakeGpu], _timeout_ms: int
    ) -> FakeEvent:
        """The next event; as NVML, an error when none has come."""
        self._check("nvmlEventSetWait_v2")
        for gpu in events:
            if gpu.xids:
                return FakeEvent(gpu, gpu.xids.pop(0))
        raise NVMLError(self.NVML_ERROR_TIMEOUT)

    def _check(self, name: str) -> None:
        if not self._initialised:
            raise NVMLError(self.NVML_ERROR_UNINITIALIZED)
        if code := self.fail.get(name):
            raise NVMLError(code)
        if name in self.unsupported:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
