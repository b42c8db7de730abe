"""How this container comes to its node's GPUs, and what is missing when it does not.

The chart lets the container runtime show them (``gpus.access``), or mounts the node's driver at the
folder that ``ROSE_DRIVER_ROOT`` names (``HostPath``). A node may have no GPU at all: then a guard
has nothing to do and stays idle.

| seen | word | what becomes of it |
|---|---|---|
| NVML answers | | the guard works |
| no NVIDIA device on the PCI bus | ``NoGpu`` | idle; looked at again every ten seconds |
| devices, and no kernel driver | ``NoDriver`` | the same |
| kernel driver, and no library in the container | ``NoAccess`` | the same |
| the library, which says why not | ``NvmlFails`` | the same |
| device files that could be opened cannot be any more | ``AccessLost`` | a new container |

A driver that appears later, and device files that are taken away (a runtime's hook gave them, and
systemd wrote the cgroup's list of devices anew), both take a new container: the process ends, and
the kubelet starts one. Next step: ``opening`` chooses the driver.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rose_agent.devices.static import StaticDriver

LIBRARY = "libnvidia-ml.so.1"
DRIVER_ROOT = "ROSE_DRIVER_ROOT"
"""Environment variable: where the chart has mounted the node's driver, if it has."""
ACCESS = "ROSE_GPU_ACCESS"
"""Environment variable: the access mode that the chart has chosen, for people."""
# Below a driver's root: GKE, the operator's driver container, distributions, Debian, Bottlerocket.
_FOLDERS = (
    "lib64",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/nvidia/tesla",
    "usr/lib",
    "lib",
)
_PROGRAMS = ("bin", "usr/bin", "sbin", "usr/sbin")
# What a program of the driver's may load out of a driver's root, which may hold a C library too.
_LIBRARIES = ("libcuda.so*", "libnvidia-*.so*")
# As nvidia-ml-py words NVML_ERROR_LIB_RM_VERSION_MISMATCH.
_MISMATCH = "version mismatch"
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of graphics and of 3D controllers; NVSwitches are bridges
CONTROL_FILE = Path("/dev/nvidiactl")


class Missing(StrEnum):
    """Why NVML does not answer here."""

    NO_GPU = "NoGpu"
    NO_DRIVER = "NoDriver"
    NO_ACCESS = "NoAccess"
    NVML_FAILS = "NvmlFails"


@dataclass(frozen=True)
class Diagnosis:
    """Why there are no GPUs: a state of a closed set, and a text for people."""

    state: Missing
    text: str


class AbsentDriver(StaticDriver):
    """The driver of a node without one: no GPU is known, so none is lent.

    Attributes:
        diagnosis: why.
    """

    name = "nvml"

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(None)
        self.diagnosis = diagnosis


def library_folder(root: Path) -> Path | None:
    """The folder of NVIDIA's libraries below a driver's root; None when they are not there."""
    return next((root / at for at in _FOLDERS if (root / at / LIBRARY).exists()), None)


def load_library(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Load NVML from the mounted driver, if there is one: who asks for its name then gets it.

    Only this library is taken from there, since a driver's root may hold a C library of its own.

    Returns:
        What was loaded; None where the runtime shows the library, or there is none.
    """
    root = environment.get(DRIVER_ROOT)
    folder = library_folder(Path(root)) if root else None
    if folder is None:
        return None
    try:
        ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None  # NVML then says that there is no library, and ``diagnose`` where it was sought
    return folder / LIBRARY


def located(program: str, environment: Mapping[str, str] = os.environ) -> str:
    """Where a program of the driver's is: in the mounted driver if it has it, else on the PATH."""
    root = environment.get(DRIVER_ROOT)
    if not root or "/" in program:
        return program
    places = (Path(root) / folder / program for folder in _PROGRAMS)
    return next((str(path) for path in places if path.exists()), program)


def driver_neighbours(links: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which programs of a mounted driver find each other and their libraries.

    Args:
        links: an empty folder, for links to NVIDIA's libraries alone.
        environment: of this process; returned as it is where no driver is mounted.
    """
    made = dict(environment)
    root = environment.get(DRIVER_ROOT)
    if not root:
        return made
    folder = library_folder(Path(root))
    for path in sorted(one for name in _LIBRARIES for one in (folder.glob(name) if folder else ())):
        (links / path.name).symlink_to(path)
    programs = [str(Path(root) / folder) for folder in _PROGRAMS]
    made["PATH"] = ":".join(filter(None, [environment.get("PATH", ""), *programs]))
    made["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(links), made.get("LD_LIBRARY_PATH")]))
    return made


def loads() -> bool:
    """Whether this process can load NVIDIA's library."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def diagnose(
    error: str,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    is_loadable: Callable[[], bool] = loads,
) -> Diagnosis:
    """Why NVML did not open.

    Args:
        error: of NVML or its bindings.
        root: of the file system in which the node's devices are looked for.
        environment: of this process.
        is_loadable: whether this process can load the library itself.
    """
    mode = environment.get(ACCESS, "")
    where = f" (gpus.access {mode})" if mode else ""
    version = _first_line(root / "proc/driver/nvidia/version")
    if is_loadable():
        two = _two_drivers(root, version) if _MISMATCH in error else ""
        return Diagnosis(Missing.NVML_FAILS, f"{two}{error}{where}")
    count = len(list(_gpus_on_bus(root)))
    if version:
        text = (
            f"the node's driver is loaded ({version}), and this container{where} is shown no "
            f"{LIBRARY}: choose gpus.access as docs/ecosystem.md says"
        )
        return Diagnosis(Missing.NO_ACCESS, text)
    if count:
        text = f"{count} NVIDIA devices on the PCI bus, and no kernel driver: install the driver"
        return Diagnosis(Missing.NO_DRIVER, text)
    return Diagnosis(Missing.NO_GPU, "this node has no NVIDIA GPU")


def _two_drivers(root: Path, module: str) -> str:
    """What to do about a driver that was upgraded under its loaded kernel module."""
    maps = _text(root / "proc/self/maps")
    loaded = re.search(r"libnvidia-ml\.so\.(\d+\.[\d.]+)$", maps, re.MULTILINE)
    library = loaded[1] if loaded is not None else "unknown"
    return (
        f"two drivers on this node: the library is {library}, the kernel module "
        f"{module or 'unknown'}; load the kernel module anew, or restart the node: "
    )


def denied(files: Iterable[Path] = (CONTROL_FILE,)) -> tuple[Path, ...]:
    """Device files that are there and that the container's cgroup does not let it open."""
    return tuple(path for path in files if _errno_of_opening(path) == errno.EPERM)


def _errno_of_opening(path: Path) -> int:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno or 0
    return 0


def _gpus_on_bus(root: Path) -> Iterable[Path]:
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind = _first_line(device / "vendor"), _first_line(device / "class")
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            yield device


def _first_line(path: Path) -> str:
    return _text(path).partition("\n")[0].strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
