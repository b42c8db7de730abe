"""The state that the NVML library answers from: a mapped file that may change while it is in use.

``State.create`` writes a machine (``profiles``), ``State.open`` maps one that exists; both give the
same object. Its ``gpus`` are views of the file, so an assignment to a field is what every process
hears from then on. Next step: ``python -m rose_dev.gpu`` does the same from a shell.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rose_dev.errors import DevelopmentError
from rose_dev.gpu import layout
from rose_dev.gpu.profiles import PROFILES, Profile

# NVML's own codes and bits.
NOT_SUPPORTED, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 9, 15, 999
THERMAL_SLOWDOWN = 0x40
DEFAULT, PROHIBITED, EXCLUSIVE_PROCESS = 0, 2, 3
BARE_METAL, PASSTHROUGH, VGPU, HOST_VGPU = 0, 1, 2, 3
IDLE_MILLIWATTS = 72_000


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU.

    Attributes:
        used_bytes: None = the driver does not tell.
        kinds: sum of ``layout.COMPUTE``, ``GRAPHICS`` and ``MPS``.
    """

    pid: int
    used_bytes: int | None
    kinds: int = layout.COMPUTE


class StateGpu:
    """One GPU of the file.

    Attributes:
        raw: its fields as NVML has them (``layout.Gpu``); change them freely.
    """

    def __init__(self, raw: layout.Gpu) -> None:
        self.raw: Any = raw

    @property
    def uuid(self) -> str:
        """``GPU-...``."""
        return str(self.raw.uuid.decode())

    @property
    def processes(self) -> tuple[GpuProcess, ...]:
        """Who is on it."""
        listed = self.raw.processes[: self.raw.process_count]
        return tuple(
            GpuProcess(p.pid, None if p.used == layout.UNKNOWN_BYTES else p.used, p.kinds)
            for p in listed
        )

    def set_processes(self, processes: Iterable[GpuProcess]) -> None:
        """Replace the list at once, as readers see it; memory in use stays as it is."""
        listed = tuple(processes)
        if len(listed) > layout.MOST_PROCESSES:
            message = f"{len(listed)} processes; a GPU has room for {layout.MOST_PROCESSES}"
            raise DevelopmentError(message)
        self.raw.process_epoch += 1
        for place, process in zip(self.raw.processes, listed, strict=False):
            place.pid, place.kinds = process.pid, process.kinds
            used = process.used_bytes
            place.used = layout.UNKNOWN_BYTES if used is None else used
        self.raw.process_count = len(listed)
        self.raw.process_epoch += 1

    def start(self, pid: int, used_bytes: int, kinds: int = layout.COMPUTE) -> None:
        """A process takes memory."""
        self.set_processes((*self.processes, GpuProcess(pid, used_bytes, kinds)))
        self.raw.memory_used += used_bytes

    def end(self, pid: int) -> None:
        """It is gone, and its memory is free."""
        left = [p for p in self.processes if p.pid != pid]
        freed = sum(p.used_bytes or 0 for p in self.processes if p.pid == pid)
        self.set_processes(left)
        self.raw.memory_used -= freed

    def fault(self, xid: int) -> None:
        """The driver reports an Xid to whoever listens from before."""
        self.raw.xids[self.raw.xid_count % layout.MOST_XIDS] = xid
        self.raw.xid_count += 1

    def lose(self, code: int = GPU_IS_LOST) -> None:
        """It falls off the bus: Xid 79, then every question fails."""
        self.fault(79)
        self.raw.lost = code

    def recover(self) -> None:
        """It answers again."""
        self.raw.lost = 0


class State:
    """The whole file, mapped.

    Attributes:
        gpus: in the order of their index.
        raw: the file's head (``layout.Header``).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(layout.Header))
        self.raw: Any = layout.Header.from_buffer(self._map)
        if (self.raw.magic, self.raw.names) != (layout.MAGIC, layout.names_checksum()):
            message = f"{path} is no state of this NVML library; create it anew"
            raise DevelopmentError(message)
        self._places = {name: place for place, name in enumerate(layout.function_names())}

    @classmethod
    def create(cls, path: Path, profile: Profile | str = "h100x8", *, seed: str = "") -> State:
        """Write a machine without processes; the same ``seed`` gives the same UUIDs.

        Raises:
            DevelopmentError: there is no such profile.
        """
        if isinstance(profile, str):
            if profile not in PROFILES:
                message = f"no profile {profile!r}; there are {', '.join(PROFILES)}"
                raise DevelopmentError(message)
            profile = PROFILES[profile]
        head = layout.Header(magic=layout.MAGIC, size=ctypes.sizeof(layout.Header))
        head.names, head.loaded, head.load = layout.names_checksum(), 1, 1
        head.gpu_count = profile.count
        _set_driver(head, profile)
        for index in range(profile.count):
            _fill(head.gpus[index], profile, index, seed)
        beside = path.with_name(f"{path.name}.new")
        beside.write_bytes(bytes(head))
        beside.chmod(0o666)  # every user of a node counts its calls there
        beside.replace(path)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> State:
        """Map a state that exists.

        Raises:
            DevelopmentError: it is of another version.
            OSError: it is not there, or is shorter than a state.
        """
        return cls(path)

    @property
    def gpus(self) -> tuple[StateGpu, ...]:
        """The GPUs that are there."""
        return tuple(StateGpu(self.raw.gpus[index]) for index in range(self.raw.gpu_count))

    def gpu(self, name: str) -> StateGpu:
        """By index or UUID.

        Raises:
            DevelopmentError: there is none.
        """
        for index, gpu in enumerate(self.gpus):
            if name in {str(index), gpu.uuid}:
                return gpu
        message = f"no GPU {name!r}; there are {', '.join(gpu.uuid for gpu in self.gpus)}"
        raise DevelopmentError(message)

    # --- calls

    def calls(self) -> Mapping[str, int]:
        """How often each function was called, by all processes together; without zeros."""
        functions = self.raw.functions
        return {n: functions[p].calls for n, p in self._places.items() if functions[p].calls}

    @property
    def total_calls(self) -> int:
        """Calls of all functions together."""
        return int(self.raw.calls)

    def forget_calls(self) -> None:
        """Count from zero."""
        self.raw.calls = 0
        for place in self._places.values():
            self.raw.functions[place].calls = 0

    def delay(self, seconds: float, function: str = "") -> None:
        """Make a function slow, or each of them; 0 = as fast as it is."""
        target = self._function(function) if function else self.raw
        target.delay_microseconds = int(seconds * 1e6)

    def fail(self, function: str, code: int) -> None:
        """Make a function answer this error; 0 = it works again."""
        self._function(function).error = code

    def _function(self, name: str) -> Any:  # noqa: ANN401  # ctypes has no type for it
        if name not in self._places:
            message = f"NVML has no function {name!r}"
            raise DevelopmentError(message)
        return self.raw.functions[self._places[name]]

    # --- the driver

    def unload_driver(self) -> None:
        """``rmmod``: nothing works, and nothing that is open now will again."""
        self.raw.loaded = 0

    def load_driver(self, profile: Profile | None = None) -> None:
        """``modprobe``, perhaps of another version: what is initialised from now on works."""
        if profile is not None:
            _set_driver(self.raw, profile)
        self.raw.load += 1
        self.raw.loaded = 1

    def close(self) -> None:
        """Unmap it; its GPUs are not to be used any more. The file stays."""
        del self.raw
        try:
            self._map.close()
        except BufferError:  # a GPU of it is still held somewhere; the mapping goes with that
            return

    def __enter__(self) -> State:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _set_driver(head: Any, profile: Profile) -> None:  # noqa: ANN401  # ctypes has no type for it
    head.driver_version = profile.driver.encode()
    head.nvml_version = f"{profile.cuda // 1000}.{profile.driver}".encode()
    head.cuda_version = profile.cuda


def _fill(gpu: Any, profile: Profile, index: int, seed: str) -> None:  # noqa: ANN401  # as above
    name = f"{seed or os.getpid()}/{'' if seed else time.monotonic_ns()}/{index}"
    bus = 0x19 + 0x11 * index  # as spread as on an HGX board
    gpu.uuid = f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, name)}".encode()
    gpu.name = profile.name.encode()
    gpu.serial = f"165{index:010d}".encode()
    gpu.bus_id = f"00000000:{bus:02X}:00.0".encode()
    gpu.bus, gpu.minor, gpu.numa_node = bus, index, index * 2 // max(2, profile.count)
    gpu.memory_total, gpu.memory_reserved = profile.memory_bytes, profile.reserved_bytes
    gpu.memory_used = profile.reserved_bytes
    gpu.pci_device_id, gpu.pci_subsystem_id = profile.pci_device_id, profile.pci_subsystem_id
    gpu.architecture = profile.architecture
    gpu.capability_major, gpu.capability_minor = profile.capability
    gpu.cores, gpu.multiprocessors = profile.cores, profile.multiprocessors
    gpu.mig_capable, gpu.persistence, gpu.ecc_mode = 1, 1, 1
    gpu.temperature, gpu.power_milliwatts = 34, IDLE_MILLIWATTS
    gpu.power_limit_milliwatts = profile.power_limit_watts * 1000
    gpu.clock_sm, gpu.clock_memory = profile.clock_sm, profile.clock_memory
