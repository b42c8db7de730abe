"""GPUs written down in a file, for machines that have none: demo, tests, control-plane trials.

The file is read again at every question, so an operator of a test can change it under a running
agent. Format (YAML)::

    gpus:
      - uuid: GPU-static-0
        memoryBytes: 16000000000
        usedBytes: 9000000000     # optional; unknown when missing
        refusal: EccErrors        # optional: MigEnabled, EccErrors, ThermalThrottling, XidError
        powerMilliwatts: 300000   # optional
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
import yaml

from rose_agent.devices.driver import DriverVersion, Gpu, GpuProcess, Memory
from rose_agent.errors import NoDevices, QueryFailed, UnknownGpu
from rose_core.devices.health import Vitals
from rose_core.uids import GpuUuid
from rose_wire import problems

# "The GPU has fallen off the bus": a fault that no program causes.
_FALLEN_OFF = 79


class StaticGpu(pydantic.BaseModel):
    """One entry of the file."""

    model_config = pydantic.ConfigDict(extra="forbid")

    uuid: GpuUuid = pydantic.Field(min_length=1)
    memory_bytes: int = pydantic.Field(alias="memoryBytes", gt=0)
    used_bytes: int | None = pydantic.Field(default=None, alias="usedBytes", ge=0)
    name: str = "static"
    refusal: Literal["", "MigEnabled", "EccErrors", "ThermalThrottling", "XidError"] = ""
    power_milliwatts: int | None = pydantic.Field(default=None, alias="powerMilliwatts", ge=0)


class StaticFile(pydantic.BaseModel):
    """The file."""

    model_config = pydantic.ConfigDict(extra="forbid")

    gpus: tuple[StaticGpu, ...] = ()

    @pydantic.model_validator(mode="after")
    def _unique(self) -> StaticFile:
        uuids = [gpu.uuid for gpu in self.gpus]
        if len(set(uuids)) != len(uuids):
            message = "two GPUs have the same uuid"
            raise ValueError(message)
        return self


class StaticDriver:
    """The driver over such a file; ``open`` checks the file once."""

    name = "static"

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def open(cls, path: Path | None) -> StaticDriver:
        """Check the file and make the driver.

        Raises:
            NoDevices: the file is missing or malformed; says where.
        """
        driver = cls(path)
        try:
            driver.gpus()
        except QueryFailed as error:
            raise NoDevices(str(error)) from error
        return driver

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU of the file, in its order."""
        return tuple(
            Gpu(gpu.uuid, index, gpu.name, gpu.memory_bytes)
            for index, gpu in enumerate(self._read().gpus)
        )

    def silent(self) -> tuple[str, ...]:
        """None: a file has a name for each."""
        return ()

    def version(self) -> DriverVersion | None:
        """None: a file is no driver."""
        return None

    def memory(self, uuid: GpuUuid) -> Memory:
        """What the file says; unknown when it does not say."""
        gpu = self._find(uuid)
        return Memory(gpu.memory_bytes, gpu.used_bytes)

    def processes(self, uuid: GpuUuid) -> tuple[GpuProcess, ...] | None:
        """Unknown: a file cannot know processes."""
        self._find(uuid)
        return None

    def vitals(self, uuid: GpuUuid) -> Vitals:
        """What the file's refusal would look like."""
        gpu = self._find(uuid)
        return Vitals(
            mig=gpu.refusal == "MigEnabled",
            uncorrected_errors=1 if gpu.refusal == "EccErrors" else None,
            thermal=True if gpu.refusal == "ThermalThrottling" else None,
            power_milliwatts=gpu.power_milliwatts,
            xids=(_FALLEN_OFF,) if gpu.refusal == "XidError" else (),
        )

    def compute_mode(self, uuid: GpuUuid) -> str | None:
        """Unknown: a file has none."""
        self._find(uuid)
        return None

    def multiprocessors(self, uuid: GpuUuid) -> int | None:
        """Unknown: a file has none."""
        self._find(uuid)
        return None

    def close(self) -> None:
        """Nothing to release."""

    def _find(self, uuid: GpuUuid) -> StaticGpu:
        for gpu in self._read().gpus:
            if gpu.uuid == uuid:
                return gpu
        raise UnknownGpu(f"no GPU {uuid} in {self._path}")

    def _read(self) -> StaticFile:
        if self._path is None:
            return StaticFile()
        try:
            content = yaml.safe_load(self._path.read_text()) or {}
            return StaticFile.model_validate(content)
        except problems.FILE_ERRORS as error:
            message = f"--static-gpus {self._path}: {problems.of_file(error)}"
            raise QueryFailed(message) from error
