"""The tap's program in the kernel, loaded by libbpf for one serving port.

It is a socket filter, the kind of program that asks least of a kernel (Linux 5.17 for its loops).
To load it takes SYS_ADMIN or BPF, which the opener of a node's tap has and a pod's own tap has not.
Next step: ``sockets`` attaches it, ``kernel_counts`` speaks with it through its map.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rose_agent.errors import NoKernelCounts
from rose_agent.os import bpf
from rose_core.telemetry.events import RECORD

FOLDER = Path(sys.prefix) / "bpf"
"""With ``tokens.o`` and, where the system has none of its own, ``libbpf.so.1``."""
SO_ATTACH_BPF = 50


@dataclass(frozen=True)
class Program:
    """Descriptors of a loaded program and of its map of streams."""

    program: int
    streams: int

    def attach(self, tap: socket.socket) -> None:
        """Make it the socket's filter for good, as ``rose_agent.os.bpf.attach`` does.

        Raises:
            NoKernelCounts: the kernel refuses it.
        """
        try:
            tap.setsockopt(socket.SOL_SOCKET, SO_ATTACH_BPF, self.program)
        except OSError as error:
            raise NoKernelCounts(f"the kernel refuses it as a filter: {error}") from error
        bpf.lock(tap)


@contextmanager
def loaded(port: int) -> Iterator[Program]:
    """The program for a port; descriptors are closed in the end, sockets keep what they hold.

    Raises:
        NoKernelCounts: no object or libbpf, or the kernel refuses it.
    """
    lib, path = _libbpf(), FOLDER / "tokens.o"
    opened = lib.bpf_object__open_file(os.fsencode(path), None) if path.exists() else None
    if not opened:
        raise NoKernelCounts(f"{path} is no BPF object: `make tap` compiles it")
    loaded = ctypes.c_void_p(opened)
    try:
        constants = _found(lib.bpf_object__find_map_by_name(loaded, b".rodata"), "its constants")
        value = struct.pack("=H", port)
        if lib.bpf_map__set_initial_value(constants, value, ctypes.c_size_t(len(value))):
            raise NoKernelCounts(f"{path} has other constants than a port: `make tap`")
        if lib.bpf_object__load(loaded):
            reason = os.strerror(ctypes.get_errno())
            raise NoKernelCounts(f"the kernel refuses the program: {reason}")
        program = _found(lib.bpf_object__find_program_by_name(loaded, b"tokens"), "its program")
        streams = _found(lib.bpf_object__find_map_by_name(loaded, b"streams"), "its streams")
        if lib.bpf_map__value_size(streams) != RECORD.size:
            raise NoKernelCounts(f"{path} is of another version: `make tap` compiles this one")
        yield Program(lib.bpf_program__fd(program), lib.bpf_map__fd(streams))
    finally:
        lib.bpf_object__close(loaded)


def _found(pointer: int | None, what: str) -> ctypes.c_void_p:
    if not pointer:
        raise NoKernelCounts(f"tokens.o has not {what}: `make tap`")
    return ctypes.c_void_p(pointer)


def _libbpf() -> ctypes.CDLL:
    own = FOLDER / "libbpf.so.1"
    try:
        lib = ctypes.CDLL(str(own) if own.exists() else "libbpf.so.1", use_errno=True)
    except OSError as error:
        raise NoKernelCounts(f"libbpf cannot be loaded: {error}") from error
    for name in (
        *("bpf_object__open_file", "bpf_object__find_map_by_name"),
        "bpf_object__find_program_by_name",
    ):
        getattr(lib, name).restype = ctypes.c_void_p
    lib.libbpf_set_print(None)  # it would speak to standard error
    return lib
