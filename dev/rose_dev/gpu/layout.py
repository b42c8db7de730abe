"""The state file's layout, once for Python and C: ``c_header`` writes it for ``nvml.c``.

All integers are of a fixed width and every structure is a multiple of eight bytes, so that the
file means the same to every process that maps it, whatever container it is in.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import zlib
from ctypes import Array, Structure, c_char, c_uint32, c_uint64, sizeof
from pathlib import Path
from typing import Any

from rose_dev.errors import NotSupported

MAGIC = 0x524F53454E564D4C  # "ROSENVML"
MOST_GPUS = 16
MOST_PROCESSES = 128  # of one GPU, of one kind or several
MOST_XIDS = 64  # that a GPU remembers; older ones are overwritten
MOST_FUNCTIONS = 640  # NVML has 430 names, and every release adds some

COMPUTE, GRAPHICS, MPS = 1, 2, 4
# What the library of driver 550 exports beside what nvidia-ml-py asks for: first versions, and the
# table through which nvidia-smi asks.
_MORE_FUNCTIONS = (
    "nvmlComputeInstanceGetInfo",
    "nvmlDeviceGetAttributes",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByPciBusId",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetPciInfo_v2",
    "nvmlDeviceRemoveGpu_v2",
    "nvmlEventSetWait",
    "nvmlGetBlacklistDeviceCount",
    "nvmlGetBlacklistDeviceInfoByIndex",
    "nvmlInit",
    "nvmlInit_v2",
    "nvmlInternalGetExportTable",
    "nvmlVgpuInstanceGetLicenseInfo",
)
UNKNOWN_BYTES = 2**64 - 1


class Process(Structure):
    """A process on a GPU; ``kinds`` is a sum of ``COMPUTE``, ``GRAPHICS`` and ``MPS``."""

    _fields_ = [("used", c_uint64), ("pid", c_uint32), ("kinds", c_uint32)]


class Gpu(Structure):
    """One GPU; change its fields to change what NVML says.

    ``lost`` is NVML's error code for every question about the GPU (15: it is lost), 0 while it
    answers. ``delay_microseconds`` is added to every question about it. ``process_epoch`` is odd
    while the list of processes is being written.
    """

    _fields_ = [
        ("uuid", c_char * 48),
        ("name", c_char * 96),
        ("serial", c_char * 32),
        ("bus_id", c_char * 32),
        ("memory_total", c_uint64),
        ("memory_reserved", c_uint64),
        ("memory_used", c_uint64),
        ("ecc_corrected", c_uint64),
        ("ecc_uncorrected", c_uint64),
        ("throttle_reasons", c_uint64),
        ("delay_microseconds", c_uint64),
        ("xid_count", c_uint64),
        ("xids", c_uint32 * MOST_XIDS),
        ("lost", c_uint32),
        ("minor", c_uint32),
        ("domain", c_uint32),
        ("bus", c_uint32),
        ("device", c_uint32),
        ("pci_device_id", c_uint32),
        ("pci_subsystem_id", c_uint32),
        ("architecture", c_uint32),
        ("capability_major", c_uint32),
        ("capability_minor", c_uint32),
        ("cores", c_uint32),
        ("multiprocessors", c_uint32),
        ("mig_capable", c_uint32),
        ("mig_current", c_uint32),
        ("mig_pending", c_uint32),
        ("virtualization", c_uint32),
        ("compute_mode", c_uint32),
        ("persistence", c_uint32),
        ("ecc_mode", c_uint32),
        ("remap_corrected", c_uint32),
        ("remap_uncorrected", c_uint32),
        ("remap_pending", c_uint32),
        ("remap_failed", c_uint32),
        ("temperature", c_uint32),
        ("power_milliwatts", c_uint32),
        ("power_limit_milliwatts", c_uint32),
        ("utilization_gpu", c_uint32),
        ("utilization_memory", c_uint32),
        ("clock_sm", c_uint32),
        ("clock_memory", c_uint32),
        ("numa_node", c_uint32),
        ("process_epoch", c_uint32),
        ("process_count", c_uint32),
        ("reserved", c_uint32),
        ("processes", Process * MOST_PROCESSES),
    ]


class Function(Structure):
    """What is known of one function of NVML: how often it was called, and how it misbehaves.

    Its place in the table is that of its name in ``function_names``. ``error`` is the code it
    answers instead of working, 0 = it works.
    """

    _fields_ = [
        ("calls", c_uint64),
        ("delay_microseconds", c_uint64),
        ("error", c_uint64),
    ]


class Header(Structure):
    """The whole file.

    ``names`` is a checksum of ``function_names``: a library that was built with others counts
    other functions, and refuses the file. ``load`` counts the driver's loads: what was initialised
    under another load is refused, as after ``rmmod`` and ``modprobe``.
    """

    _fields_ = [
        ("magic", c_uint64),
        ("size", c_uint64),
        ("names", c_uint64),
        ("driver_version", c_char * 80),
        ("nvml_version", c_char * 80),
        ("cuda_version", c_uint32),
        ("gpu_count", c_uint32),
        ("loaded", c_uint32),
        ("load", c_uint32),
        ("delay_microseconds", c_uint64),
        ("calls", c_uint64),
        ("functions", Function * MOST_FUNCTIONS),
        ("gpus", Gpu * MOST_GPUS),
    ]


@functools.cache
def function_names() -> tuple[str, ...]:
    """Every function that ``nvidia-ml-py`` and NVIDIA's tools may ask for, in order.

    Raises:
        NotSupported: nvidia-ml-py is missing.
    """
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        message = "nvidia-ml-py is missing; install rose-gpu[dev]"
        raise NotSupported(message)
    text = Path(found.origin).read_text()
    asked = re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', text)
    return tuple(sorted({*asked, *_MORE_FUNCTIONS, "nvmlErrorString"}))


def names_checksum() -> int:
    """CRC-32 of ``function_names``, in their order."""
    return zlib.crc32(" ".join(function_names()).encode())


_C_NAMES: dict[Any, str] = {c_uint32: "uint32_t", c_uint64: "uint64_t"}


def c_header() -> str:
    """The same structures in C, with their sizes asserted, and the functions' places."""
    lines = ["#include <stdint.h>", f"#define NAMES {names_checksum():#x}"]
    lines.append(f"enum {{ {', '.join(f'F_{name}' for name in function_names())} }};")
    constants = (
        *("MAGIC", "MOST_GPUS", "MOST_PROCESSES", "MOST_XIDS", "MOST_FUNCTIONS"),
        *("COMPUTE", "GRAPHICS", "MPS"),
    )
    lines.extend(f"#define {name} {globals()[name]:#x}" for name in constants)
    for kind in (Process, Gpu, Function, Header):
        fields = " ".join(_c_field(field[0], field[1]) for field in kind._fields_)
        name = kind.__name__.lower()
        lines.append(f"struct {name} {{ {fields} }};")
        lines.append(f'_Static_assert(sizeof(struct {name}) == {sizeof(kind)}, "{name}");')
    return "\n".join(lines) + "\n"


def _c_field(name: str, kind: Any) -> str:  # noqa: ANN401  # ctypes has no type for its types
    if isinstance(kind, type) and issubclass(kind, Array):
        of: Any = kind._type_
        inner = "char" if of is c_char else _c_name(of)
        return f"{inner} {name}[{kind._length_}];"
    return f"{_c_name(kind)} {name};"


def _c_name(kind: Any) -> str:  # noqa: ANN401  # as above
    return _C_NAMES.get(kind) or f"struct {kind.__name__.lower()}"
