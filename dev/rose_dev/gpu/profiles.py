"""Machines that the NVML library can be: figures of real ones, as their drivers report them."""

from __future__ import annotations

from dataclasses import dataclass, replace

_MIB = 1 << 20


@dataclass(frozen=True)
class Profile:
    """A node's GPUs, all alike.

    Attributes:
        memory_bytes: as NVML counts it; ``reserved_bytes`` of it are the driver's own.
        pci_device_id: device and vendor.
        cuda: as NVML writes it, 12.4 is 12040.
    """

    name: str
    count: int
    memory_bytes: int
    reserved_bytes: int
    pci_device_id: int
    pci_subsystem_id: int
    power_limit_watts: int
    clock_sm: int
    clock_memory: int
    architecture: int = 9  # Hopper
    capability: tuple[int, int] = (9, 0)
    cores: int = 16_896
    multiprocessors: int = 132
    # Older ones do not run the CUDA 13 of the rollout engine (``rose_core.devices.drivers``).
    driver: str = "580.95.05"
    cuda: int = 13_000

    def with_driver(self, version: str) -> Profile:
        """The same GPUs under another driver; CUDA is the version that came with it."""
        major = int(version.split(".", maxsplit=1)[0])
        return replace(self, driver=version, cuda=_CUDA_OF.get(major, self.cuda))


_CUDA_OF = {470: 11_040, 525: 12_000, 535: 12_020, 550: 12_040, 570: 12_080, 580: 13_000}

_H100 = Profile(
    name="NVIDIA H100 80GB HBM3",
    count=8,
    memory_bytes=81_559 * _MIB,
    reserved_bytes=551 * _MIB,
    pci_device_id=0x233010DE,
    pci_subsystem_id=0x16C110DE,
    power_limit_watts=700,
    clock_sm=1980,
    clock_memory=2619,
)

PROFILES: dict[str, Profile] = {
    "h100x8": _H100,
    "h100x2": replace(_H100, count=2),
    "h200x8": replace(
        _H100,
        name="NVIDIA H200",
        memory_bytes=143_771 * _MIB,
        reserved_bytes=603 * _MIB,
        pci_device_id=0x233510DE,
        pci_subsystem_id=0x18BE10DE,
        clock_memory=3201,
    ),
}
