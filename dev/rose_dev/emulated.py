"""A machine of another kernel inside this one: ``python -m rose_dev.emulated COMMAND...``, as root.

Nodes of today have cgroup v2 alone, and a machine for development may have v1. Debian's kernel runs
here in QEMU, with v2 alone:

| the emulated machine | has |
|---|---|
| files | this machine's, below a layer in its own memory: what it writes is gone with it |
| cores, memory | two, ``--memory`` |
| network | none but its loopback |
| speed | this machine's with KVM; without, every instruction is emulated, 20 to 30 times slower |

Kernel and QEMU come once into ``$ROSE_CACHE/emulated``; nothing of this machine is changed.
The exit code is the command's.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rose_dev.environments import cache_folder, log
from rose_dev.sandbox_parts import Impossible, Packages, run

SUITE = "trixie"
_PACKAGES = ("qemu-system-x86", "linux-image-amd64", "busybox-static", "kmod")
_EARLY = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""Modules of the kernel that its files are mounted by; all others are loaded by name later."""
_LIBRARIES = "lib/x86_64-linux-gnu"
_ENDED = re.compile(r"\[emulated\] exit code (\d+)")
_INIT = """#!/bin/busybox sh
set -e
b=/bin/busybox
for name in proc sysfs devtmpfs; do $b mkdir -p /$name; $b mount -t $name $name /$name; done
while read module; do $b insmod /modules/$module; done </modules/order
$b mkdir -p /files /layer /whole
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro files /files
$b mount -t tmpfs -o size=80% layer /layer
$b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/files,upperdir=/layer/upper,workdir=/layer/work whole /whole
$b mount --move /proc /whole/proc
$b mount --move /sysfs /whole/sys
$b mount --move /devtmpfs /whole/dev
exec $b switch_root /whole /bin/sh "$start"  # of the kernel's command line
"""
_START = """
export HOME=/root
mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts /lib/modules
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing
mount --bind "$modules" /lib/modules
echo "$modprobe" >/proc/sys/kernel/modprobe
for module in btrfs loop veth; do "$modprobe" $module; done
ip link set lo up
ulimit -n 65536
mkdir /memory
mount -t tmpfs -o mode=1777,size=60% tmpfs /memory
export TMPDIR=/memory  # a layer over files shows other inode numbers in a folder than in its files
for path in $copied; do
  mkdir -p "/memory/copied$path"
  cp -a "$path/." "/memory/copied$path"
  mount --bind "/memory/copied$path" "$path"
done
cd "$folder"
eval "$command"
echo "[emulated] exit code $?"
sync
echo 1 >/proc/sys/kernel/sysrq
echo o >/proc/sysrq-trigger
sleep 60
"""


def install(cache: Path) -> Path:
    """Kernel and QEMU, once; returns their folder.

    Raises:
        Impossible: not as root, or Debian's packages cannot be had here.
    """
    if os.geteuid() != 0:
        raise Impossible("root is needed: the emulated machine reads this one's files")
    folder = cache / "emulated"
    stamp, wanted = folder / ".stamp", "\n".join((SUITE, *_PACKAGES, *_EARLY, _INIT))
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    log("the kernel and QEMU for an emulated machine")
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    packages = Packages(folder / "packages", SUITE)
    packages.refresh()
    packages.unpack(*_PACKAGES)
    root = packages.root
    (root / "lib").symlink_to("usr/lib")  # of the package base-files, which is not unpacked
    for program in ("usr/bin/qemu-system-x86_64", "usr/sbin/depmod", "usr/sbin/modprobe"):
        packages.put(program, folder / "bin")
    (image,) = (root / "boot").glob("vmlinuz-*")
    version = image.name.removeprefix("vmlinuz-")
    shutil.copy(image, folder / "vmlinuz")
    run([str(folder / "bin" / "depmod"), "-b", str(root), version])
    _make_initrd(root, version, folder)
    stamp.write_text(wanted)
    return folder


def _make_initrd(root: Path, version: str, folder: Path) -> None:
    early = folder / "initrd"
    shutil.rmtree(early, ignore_errors=True)
    (early / "modules").mkdir(parents=True)
    (early / "bin").mkdir()
    shutil.copy(root / "usr" / "bin" / "busybox", early / "bin")
    needed: dict[Path, None] = {}
    for module in _EARLY:
        shown = subprocess.run(
            [
                *(str(folder / "bin" / "modprobe"), "-d", str(root), "-S", version),
                *("--show-depends", module),
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        needed |= {Path(found): None for found in re.findall(r"^insmod (\S+)", shown, re.MULTILINE)}
    for file in needed:
        shutil.copy(file, early / "modules")
    (early / "modules" / "order").write_text("".join(f"{file.name}\n" for file in needed))
    init = early / "init"
    init.write_text(_INIT)
    init.chmod(0o755)
    pack = './bin/busybox find . | ./bin/busybox cpio -o -H newc | ./bin/busybox gzip >"$0"'
    run(["sh", "-c", pack, str(folder / "initrd.gz")], None, early)


def start_script(
    folder: Path, place: Path, command: Sequence[str], copied: Sequence[Path] = ()
) -> str:
    """What the machine's first process runs.

    Args:
        folder: of ``install``.
        place: the command's folder.
        command: its words.
        copied: folders that are put into its memory; their paths have no blanks.
    """
    root = folder / "packages" / "root"
    variables = {
        "PATH": os.environ["PATH"],
        "modules": str(root / "usr" / "lib" / "modules"),
        "modprobe": str(folder / "bin" / "modprobe"),
        "copied": " ".join(map(str, copied)),
        "folder": str(place),
        "command": shlex.join(command),
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items()) + _START


def accelerator(flags: str, *, device: bool) -> tuple[str, ...]:
    """QEMU's arguments.

    Args:
        flags: of /proc/cpuinfo. Some machines have KVM's device, and no stock kernel runs by it.
        device: /dev/kvm may be opened.
    """
    if device and re.search(r"\b(vmx|svm)\b", flags):
        return ("-accel", "kvm", "-cpu", "host")
    return ("-accel", "tcg,thread=multi", "-cpu", "max")


def play(folder: Path, command: Sequence[str], mebibytes: int, copied: Sequence[Path]) -> int:
    """Run a command in a machine of its own, with its output here; returns its exit code.

    Raises:
        Impossible: the machine ended before the command.
    """
    speed = accelerator(Path("/proc/cpuinfo").read_text(), device=os.access("/dev/kvm", os.W_OK))
    user = folder / "packages" / "root" / "usr"
    with tempfile.TemporaryDirectory(prefix="rose-emulated-") as own:
        start = Path(own) / "start"
        start.write_text(start_script(folder, Path.cwd(), command, copied))
        machine = subprocess.Popen(
            [
                *(str(folder / "bin" / "qemu-system-x86_64"), *speed),
                *("-smp", "2", "-m", str(mebibytes), "-nic", "none", "-no-reboot"),
                *("-L", str(user / "share" / "qemu"), "-L", str(user / "share" / "seabios")),
                *("-display", "none", "-vga", "none", "-monitor", "none", "-serial", "stdio"),
                *("-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initrd.gz")),
                *("-append", f"console=ttyS0 loglevel=4 edd=off panic=-1 start={start}"),
                *(
                    "-virtfs",
                    "local,path=/,mount_tag=files,security_model=none,readonly=on,multidevs=remap",
                ),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            # Where the machine has a QEMU of its own, its modules are of another build.
            env=os.environ | {"QEMU_MODULE_DIR": str(user / _LIBRARIES / "qemu")},
        )
        with machine:
            try:
                return _exit_code(machine)
            finally:
                machine.kill()


def _exit_code(machine: subprocess.Popen[str]) -> int:
    for line in machine.stdout or ():
        if ended := _ENDED.search(line):
            return int(ended[1])
        print(line, end="", flush=True)
    raise Impossible("the emulated machine ended before what it was to run")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m rose_dev.emulated", description=__doc__)
    parser.add_argument("--memory", type=int, default=6144, metavar="MIB")
    parser.add_argument(
        "--copy",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="into its memory: what lies on this machine's files has no mapped mounts",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    try:
        return play(install(cache_folder()), given.command, given.memory, given.copy)
    except Impossible as error:
        print(f"SKIPPED the emulated machine: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
