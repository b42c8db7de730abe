"""The tap's program in the kernel, fed packet by packet: no socket, and the order is ours."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rose_agent.errors import NoKernelCounts
from rose_agent.os import bpf_maps
from rose_agent.os.bpf_maps import HashMap
from rose_agent.tap import kernel_counts, kernel_program
from rose_agent.tap.kernel_program import Program

_TEST_RUN = 10
_TEST = struct.Struct("=IIIIQQIIIIQQIIII")
_RESULT_AT = 4
_FRAMES = {4: b"\x08\x00", 6: b"\x86\xdd"}


@functools.cache
def refusal() -> str:
    """Why no program can be loaded here; empty when one can."""
    try:
        with kernel_program.loaded(1):
            return ""
    except NoKernelCounts as error:
        return str(error)


@dataclass
class Kernel:
    """One loaded program and its map."""

    program: Program
    streams: HashMap

    def passes(self, packet: bytes) -> int:
        """How many bytes of an IP packet it lets pass; 0 = it keeps it back."""
        frame = bytes(12) + _FRAMES.get(packet[0] >> 4, b"\x08\x00") + packet
        data = ctypes.create_string_buffer(frame, len(frame))
        attributes = ctypes.create_string_buffer(
            _TEST.pack(
                *(self.program.program, 0, len(frame), 0, ctypes.addressof(data), 0),
                *(1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            ),
            _TEST.size,
        )
        bpf_maps.call(_TEST_RUN, attributes)
        return int(struct.unpack_from("=I", attributes, _RESULT_AT)[0])


@contextmanager
def kernel(port: int) -> Iterator[Kernel]:
    """A program of its own for the port."""
    with kernel_program.loaded(port) as program:
        streams = kernel_counts.streams(os.dup(program.streams))
        try:
            yield Kernel(program, streams)
        finally:
            streams.close()
