"""The node's NVIDIA driver as the GPU operator's driver container leaves it: one root folder.

| path below ``/run/nvidia/driver`` | |
|---|---|
| ``usr/lib/MULTIARCH`` | libcuda of Debian; NVML of our own, with its state beside it |
| ``usr/bin`` | nvidia-smi and the MPS daemon, of Debian |
| ``dev`` | device files that no kernel driver answers |
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from rose_dev.gpu.library import SONAME, library
from rose_dev.gpu.profiles import PROFILES
from rose_dev.gpu.state import State
from rose_dev.nvidia_packages import unpacked

PACKAGES = ("libcuda1", "libnvidia-ptxjitcompiler1", "nvidia-smi", "nvidia-cuda-mps")
"""Of Debian's non-free."""
ROOT = Path("/run/nvidia/driver")
"""In the node's file system."""
STATE_NAME = "nvml.state"
NVIDIA_MAJOR, UVM_MAJOR = 195, 511
_FILES = {
    "nvidiactl": (NVIDIA_MAJOR, 255),
    "nvidia-modeset": (NVIDIA_MAJOR, 254),
    "nvidia-uvm": (UVM_MAJOR, 0),
    "nvidia-uvm-tools": (UVM_MAJOR, 1),
}


def libraries(root: Path) -> Path:
    """The folder of libraries below a driver's root."""
    return root / "usr/lib" / f"{os.uname().machine}-linux-gnu"


def state_file(root: Path) -> Path:
    """Of the NVML library below a driver's root."""
    return libraries(root) / STATE_NAME


def programs_of(driver: int) -> list[Path]:
    """The file trees of NVIDIA's own programs of one driver; downloaded at the first call.

    Raises:
        NotSupported: this machine cannot get them; says why.
    """
    return [unpacked(package, driver) for package in PACKAGES]


def version_of(trees: list[Path]) -> str:
    """The driver's version, as its library's name has it."""
    pattern = re.compile(r"libcuda\.so\.(\d+\.[\d.]+)$")
    names = (path.name for tree in trees for path in tree.rglob("libcuda.so.*"))
    return next(found[1] for found in map(pattern.match, names) if found)


def lay_out(root: Path, profile: str, trees: list[Path]) -> State:
    """Make a driver's root with its GPUs.

    Args:
        root: the folder, as this process sees it.
        profile: name of the machine (``rose_dev.gpu.profiles``).
        trees: NVIDIA's own programs (``programs_of``); empty = without them.

    Raises:
        DevelopmentError: the NVML library cannot be built.
    """
    machine = PROFILES[profile]
    folder, programs = libraries(root), root / "usr/bin"
    for made in (folder, programs, root / "dev"):
        made.mkdir(parents=True, exist_ok=True)
    if trees:
        machine = machine.with_driver(version_of(trees))
    for tree in trees:
        _copy_programs(tree, folder, programs)
    real = folder / f"libnvidia-ml.so.{machine.driver}"
    shutil.copy(library(), real)
    (folder / SONAME).symlink_to(real.name)
    make_device_files(root / "dev", profile)
    return State.create(state_file(root), machine, seed="rose-dev")


def make_device_files(folder: Path, profile: str) -> None:
    """Those of the GPUs and those that all share, as udev would make them."""
    files = {f"nvidia{index}": (NVIDIA_MAJOR, index) for index in range(PROFILES[profile].count)}
    for name, numbers in {**files, **_FILES}.items():
        path = folder / name
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*numbers))
        path.chmod(0o666)


def _copy_programs(tree: Path, folder: Path, programs: Path) -> None:
    for library_file in sorted(tree.glob("usr/lib/*/nvidia/current/lib*.so*")):
        if not library_file.name.startswith("libnvidia-ml."):
            shutil.copy2(library_file, folder / library_file.name, follow_symlinks=False)
    for pattern in ("usr/lib/nvidia/current/nvidia-smi", "usr/bin/nvidia-*", "usr/sbin/nvidia-*"):
        for program in tree.glob(pattern):
            shutil.copy2(program, programs / program.name)
