"""Choose a device driver by name. Next step: ``nvml``, ``static``; ``access`` where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rose_agent.devices import access
from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.devices.static import StaticDriver
from rose_agent.errors import NoDevices


def open_driver(kind: Literal["static", "nvml"], static_gpus: Path | None = None) -> DeviceDriver:
    """Open a driver by name; NVIDIA's library is imported only when its driver is opened.

    Args:
        kind: ``nvml``, or ``static`` for machines without GPU.
        static_gpus: the file of the static driver; None = no GPU at all.

    Raises:
        NoDevices: the driver cannot work here; says why.
    """
    if kind == "static":
        return StaticDriver.open(static_gpus)
    access.load_library()
    return NvmlDriver.open()


def open_or_idle(kind: Literal["static", "nvml"], static_gpus: Path | None = None) -> DeviceDriver:
    """As ``open_driver``; where NVML cannot be opened, the driver of a node without GPUs.

    Raises:
        NoDevices: the file of the static driver is missing or malformed.
    """
    if kind == "static":
        return open_driver(kind, static_gpus)
    try:
        return open_driver(kind)
    except NoDevices as error:
        return access.AbsentDriver(access.diagnose(str(error)))
