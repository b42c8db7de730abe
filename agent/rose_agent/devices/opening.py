"""Choose a device driver by name. Next step: ``nvml`` or ``static``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.devices.static import StaticDriver


def open_driver(kind: Literal["static", "nvml"], static_gpus: Path | None = None) -> DeviceDriver:
    """Open a driver by name; NVIDIA's library is imported only when its driver is opened.

    Args:
        kind: ``nvml``, or ``static`` for machines without GPU.
        static_gpus: the file of the static driver; None = no GPU at all.

    Raises:
        NoDevices: the driver cannot work here; says why.
    """
    return NvmlDriver.open() if kind == "nvml" else StaticDriver.open(static_gpus)
