"""How much memory an engine's processes hold: on its GPUs, or in host memory where there are none.

NVML names processes as the node's pid namespace does, which a container without ``hostPID`` cannot
translate. Then the whole GPU's use stands in: it serves to compare before with after, because
serving takes its memory at its start.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rose_agent.devices.driver import DeviceDriver
from rose_agent.errors import DeviceError
from rose_core.uids import GpuUuid


class MemoryMeter(Protocol):
    """Measures the memory of an engine's processes."""

    def read(self, pids: Sequence[int], gpu_uuids: Sequence[GpuUuid]) -> int | None:
        """Bytes held now; None = unknown."""
        ...


class ResidentMeter:
    """Engines on CPU: private resident memory of the processes."""

    def read(self, pids: Sequence[int], gpu_uuids: Sequence[GpuUuid]) -> int | None:
        """Private bytes of the processes together; None = unknown. Shared pages are nobody's."""
        del gpu_uuids
        held = [_private_bytes(pid) for pid in pids if pid > 0]
        known = [found for found in held if found is not None]
        return sum(known) if known else None


class GpuMeter:
    """Engines on GPUs.

    Args:
        driver: asked at every reading.
    """

    def __init__(self, driver: DeviceDriver) -> None:
        self._driver = driver

    def read(self, pids: Sequence[int], gpu_uuids: Sequence[GpuUuid]) -> int | None:
        """What they hold on the GPU where it is most; what is used there if nobody names them.

        An engine's size is what it takes of each of its GPUs.
        """
        if not gpu_uuids:
            return None
        try:
            own = [self._own(uuid, frozenset(pids)) for uuid in gpu_uuids]
            if any(found is not None for found in own):
                return max(found or 0 for found in own)
            used = [self._driver.memory(uuid).used_bytes for uuid in gpu_uuids]
        except DeviceError:
            return None
        return max(found for found in used if found is not None) if None not in used else None

    def _own(self, uuid: GpuUuid, pids: frozenset[int]) -> int | None:
        listed = self._driver.processes(uuid) or ()
        held = [process.used_bytes for process in listed if process.pid in pids]
        known = [found for found in held if found is not None]
        return sum(known) if held and len(known) == len(held) else None


def meter_for(driver: DeviceDriver | None) -> MemoryMeter:
    """Where the engines of this host hold their memory."""
    return GpuMeter(driver) if driver is not None and driver.name == "nvml" else ResidentMeter()


def _private_bytes(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
