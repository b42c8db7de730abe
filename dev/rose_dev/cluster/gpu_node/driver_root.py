"""The node's NVIDIA driver as the GPU operator's driver container leaves it: one root folder.

| path below ``/run/nvidia/driver`` | |
|---|---|
| ``usr/lib/MULTIARCH`` | libcuda of Debian; NVML of our own, with its state beside it |
| ``usr/bin`` | nvidia-smi and the MPS daemon, of Debian |
| ``dev`` | device files that no kernel driver answers |

NVIDIA's programs come from Debian's ``non-free``, and nothing is installed: packages are unpacked
into ``$ROSE_CACHE/nvidia/SUITE/PACKAGE``. Where they come from is what this machine's apt is set up
with: the archive of its ``main`` component, asked for ``non-free`` in a configuration of our own,
so that the machine's stays as it is. Each Debian suite has one driver (``SUITES``). A test that
needs a program calls ``unpacked`` and is skipped with the reason it raises.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from rose_dev.cluster.parts import cache_root
from rose_dev.errors import CommandFailed, NotSupported
from rose_dev.gpu.library import SONAME, library
from rose_dev.gpu.profiles import PROFILES
from rose_dev.gpu.state import State
from rose_dev.shell import locked, run

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
SUITES = {535: "bookworm", 550: "trixie"}
"""Driver, and the Debian suite that has it."""

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_SECONDS = 120.0
_STAMP = ".unpacked"


def unpacked(package: str, driver: int) -> Path:
    """A folder with the package's files, as below ``/``.

    Raises:
        NotSupported: this machine's apt has no Debian archive, or the package is not in it.
    """
    folder = cache_root() / "nvidia" / SUITES[driver] / package
    with locked(folder.with_name(f"{package}.lock")):
        if not (folder / _STAMP).exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _unpack(package, SUITES[driver], folder)
            except CommandFailed as error:
                text = f"{package} of driver {driver} cannot be had from Debian non-free: {error}"
                raise NotSupported(text) from error
            (folder / _STAMP).touch()
    return folder


def _unpack(package: str, suite: str, folder: Path) -> None:
    archive = _archive()
    with tempfile.TemporaryDirectory(prefix="rose-apt-") as scratch:
        place = Path(scratch)
        place.chmod(0o755)  # apt fetches as a user of its own
        options = _configure(place, archive, suite)
        run(["apt-get", *options, "-qq", "update"], seconds=_SECONDS)
        run(["apt-get", *options, "-qq", "download", package], seconds=_SECONDS, cwd=place)
        (found,) = place.glob("*.deb")
        run(["dpkg", "-x", found, folder], seconds=_SECONDS)


def _archive() -> str:
    """Address of the Debian archive in this machine's own configuration.

    Raises:
        NotSupported: there is none.
    """
    if shutil.which("apt-get") is None or not _KEYRING.exists():
        raise NotSupported("NVIDIA's programs are taken from Debian, and this is no Debian machine")
    form = "--format=$(REPO_URI) $(COMPONENT)"
    listed = run(["apt-get", "indextargets", form, "Created-By: Packages"], seconds=_SECONDS)
    rows = [line.split() for line in listed.stdout.splitlines()]
    found = [uri for uri, part in rows if part == "main" and uri.rstrip("/").endswith("/debian")]
    if not found:
        raise NotSupported("this machine's apt has no Debian archive with the component main")
    return found[0]


def _configure(place: Path, archive: str, suite: str) -> list[str]:
    """An apt configuration with one archive; returns the options that select it."""
    sources = place / "rose.list"
    sources.write_text(f"deb [signed-by={_KEYRING}] {archive} {suite} non-free\n")
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (place / folder).mkdir(parents=True)
    (place / "state/status").touch()
    chosen = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Dir::State": place / "state",
        "Dir::State::status": place / "state/status",
        "Dir::Cache": place / "cache",
    }
    # As ourselves: apt's user may not enter a folder of a test.
    flags = [f"-o{name}={value}" for name, value in chosen.items()]
    return [*flags, "-oAPT::Sandbox::User=root"]


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
