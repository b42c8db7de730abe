"""The inspector's program in the kernel, loaded by libbpf: counters of each watched group.

Raw tracepoints only: kernels of clouds often have neither kprobes nor BPF trampolines for others.
Next step: ``bpf`` reads the counters.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from rose_sandbox.errors import Unavailable
from rose_wire.cgroups import TOP, is_unified, paths_by_controller

URING, OTHERS_MEMORY, SYSTEM_V, METADATA = range(4)
RARE = 4
PROGRAMS = ("call_begins", "process_begins")
_VALUE = struct.Struct(f"={2 + RARE}Q")


@dataclass(frozen=True)
class Counters:
    """Of a group since it was watched.

    Attributes:
        calls: system calls.
        starts: processes and threads begun.
        rare: calls of each rare kind, by its number.
    """

    calls: int
    starts: int
    rare: tuple[int, ...]


class KernelProgram:
    """Loaded and attached until ``close``.

    Args:
        folder: with ``effects.o`` and ``libbpf.so.1``.

    Raises:
        Unavailable: the kernel refuses it, or a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        own = folder / "libbpf.so.1"
        try:
            self._lib = ctypes.CDLL(str(own) if own.exists() else "libbpf.so.1", use_errno=True)
        except OSError as error:
            raise Unavailable(f"libbpf cannot be loaded ({error}): run `make sandbox`") from error
        for name in (
            *("bpf_object__open_file", "bpf_object__find_program_by_name"),
            *("bpf_program__attach", "bpf_object__find_map_by_name"),
        ):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._object = self._lib.bpf_object__open_file(os.fsencode(folder / "effects.o"), None)
        if not self._object:
            raise Unavailable(f"{folder / 'effects.o'} is no BPF object: run `make sandbox`")
        self._links: list[int] = []
        if self._lib.bpf_object__load(ctypes.c_void_p(self._object)):
            raise Unavailable(
                f"the kernel refuses the inspector: {os.strerror(ctypes.get_errno())}"
            )
        for name in PROGRAMS:
            program = self._lib.bpf_object__find_program_by_name(
                ctypes.c_void_p(self._object), name.encode()
            )
            link = self._lib.bpf_program__attach(ctypes.c_void_p(program)) if program else None
            if not link:
                self.close()
                raise Unavailable(f"the kernel does not let {name} listen")
            self._links.append(link)
        watched = self._lib.bpf_object__find_map_by_name(ctypes.c_void_p(self._object), b"watched")
        self._map = self._lib.bpf_map__fd(ctypes.c_void_p(watched))

    def watch(self, group: int) -> None:
        """Count a group from zero.

        Raises:
            Unavailable: there is no room for more.
        """
        value = bytes(_VALUE.size)
        if self._lib.bpf_map_update_elem(
            self._map, struct.pack("=Q", group), value, ctypes.c_ulonglong(0)
        ):
            raise Unavailable("the inspector has no room for another sandbox")

    def read(self, group: int) -> Counters | None:
        """A group's counters; None where it is not watched."""
        value = ctypes.create_string_buffer(_VALUE.size)
        if self._lib.bpf_map_lookup_elem(self._map, struct.pack("=Q", group), value):
            return None
        calls, starts, *rare = _VALUE.unpack(value.raw)
        return Counters(calls, starts, tuple(rare))

    def forget(self, group: int) -> None:
        """Count it no longer."""
        self._lib.bpf_map_delete_elem(self._map, struct.pack("=Q", group))

    def is_alive(self) -> bool:
        """Whether it counts: a call of this process is seen."""
        try:
            own = _own_group().stat().st_ino
            self.watch(own)
        except (OSError, Unavailable):
            return False
        os.getppid()
        counters = self.read(own)
        self.forget(own)
        return counters is not None and counters.calls > 0

    def close(self) -> None:
        """Out of the kernel."""
        for link in self._links:
            self._lib.bpf_link__destroy(ctypes.c_void_p(link))
        self._links = []
        if self._object:
            self._lib.bpf_object__close(ctypes.c_void_p(self._object))
            self._object = None


def _own_group() -> Path:
    unified = TOP if is_unified() else TOP / "unified"
    path = paths_by_controller(Path("/proc/self/cgroup").read_text()).get("")
    if path is None:
        raise Unavailable("this process is in no unified control group")
    return unified / str(path).lstrip("/")
