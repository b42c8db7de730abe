"""The interface of device drivers; ``None`` everywhere means unknown, never zero.

Next step: ``opening`` chooses one by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rose_core.devices.health import Vitals
from rose_core.uids import GpuUuid


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        uuid: stable name, ``GPU-...``.
        index: number on this node.
        memory_bytes: total device memory.
        minor: number of its device file, by which some allocate it; None = unknown.
    """

    uuid: GpuUuid
    index: int
    name: str
    memory_bytes: int
    minor: int | None = None


@dataclass(frozen=True)
class Memory:
    """Device memory now, bytes."""

    total_bytes: int
    used_bytes: int | None


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU.

    Attributes:
        pid: in the pid namespace the driver sees (the node's, for NVML).
        used_bytes: memory it holds.
    """

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class DriverVersion:
    """What is installed on the node.

    Attributes:
        driver: as NVIDIA numbers it, ``550.163.01``.
        cuda: newest CUDA that it runs, major and minor.
    """

    driver: str
    cuda: tuple[int, int]


class DeviceDriver(Protocol):
    """Access to the GPUs of this node."""

    @property
    def name(self) -> str:
        """``nvml`` or ``static``."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU, by index; one that answered before and does not now is among them.

        Raises:
            QueryFailed: the driver did not answer.
        """

    def silent(self) -> tuple[str, ...]:
        """GPUs that are there and have never answered, for people; as of the last ``gpus``."""

    def version(self) -> DriverVersion | None:
        """Of the driver; None when there is none, as without GPUs.

        Raises:
            QueryFailed: the driver did not answer.
        """

    def memory(self, uuid: GpuUuid) -> Memory:
        """Memory of a GPU.

        Raises:
            UnknownGpu: there is no such GPU.
            QueryFailed: the driver did not answer.
        """

    def processes(self, uuid: GpuUuid) -> tuple[GpuProcess, ...] | None:
        """Who holds memory on a GPU; None when the driver cannot know.

        Raises:
            UnknownGpu: there is no such GPU.
            QueryFailed: the driver did not answer.
        """

    def vitals(self, uuid: GpuUuid) -> Vitals:
        """What ``rose_core.devices.health`` judges a GPU by.

        Raises:
            UnknownGpu: there is no such GPU.
            QueryFailed: the driver did not answer.
        """

    def compute_mode(self, uuid: GpuUuid) -> str | None:
        """``Default``, ``ExclusiveProcess`` or ``Prohibited``; None when the driver cannot know.

        Raises:
            UnknownGpu: there is no such GPU.
            QueryFailed: the driver did not answer.
        """

    def multiprocessors(self, uuid: GpuUuid) -> int | None:
        """How many the whole GPU has; None when the driver cannot know.

        Raises:
            UnknownGpu: there is no such GPU.
            QueryFailed: the driver did not answer.
        """

    def close(self) -> None:
        """Release the driver's library."""
