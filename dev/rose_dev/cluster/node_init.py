"""Process 1 of the node: makes a file system that only the node sees, then reaps orphans.

Started by ``unshare`` in new mount, network and process namespaces. When it ends, the kernel ends
every process of the node, and with the last one its mounts, links and packet filter tables go: that
is what makes ``rose dev down`` clean whatever happened before.

    python -m rose_dev.cluster.node_init RUN_DIRECTORY
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_BIND, _RECURSIVE, _SHARED = 0x1000, 0x4000, 1 << 20

# What kubelet wants to find in /proc/sys. It would write the machine's own values otherwise, and
# vm.overcommit_memory changes how memory behaves for everybody: the node sees files instead.
SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
# Folders with names that kubelet, containerd and CNI do not let one choose.
OVERLAYS = ("/run", "/var/lib", "/var/log")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """The system call of the same name.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode() or None for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def make_file_system(run: Path) -> None:
    """Lay private, empty layers over the folders the node writes to.

    Raises:
        OSError: the kernel refused a mount, for example without overlayfs.
    """
    scratch = run / "private"
    scratch.mkdir()
    mount("tmpfs", str(scratch), "tmpfs")
    handle = os.open(run, os.O_PATH)  # the layer over /run hides the run directory itself
    reachable = Path(f"/proc/self/fd/{handle}")
    for folder in OVERLAYS:
        layer = reachable / "private" / folder.strip("/").replace("/", "-")
        for name in ("upper", "work"):
            (layer / name).mkdir(parents=True)
        options = f"lowerdir={folder},upperdir={layer / 'upper'},workdir={layer / 'work'}"
        mount("overlay", folder, "overlay", options=options)
    run.mkdir(parents=True, exist_ok=True)
    mount(str(reachable), str(run), flags=_BIND | _RECURSIVE)
    os.close(handle)
    rose = Path("/run/rose")
    rose.mkdir(mode=0o700, exist_ok=True)
    mount("tmpfs", str(rose), "tmpfs", options="mode=0700")
    for name, value in SYSCTLS.items():
        shown = run / "sysctl" / name.replace("/", ".")
        shown.parent.mkdir(exist_ok=True)
        shown.write_text(value + "\n")
        if Path("/proc/sys", name).exists():
            mount(str(shown), f"/proc/sys/{name}", flags=_BIND)
    mount("", "/", flags=_SHARED | _RECURSIVE)


def reap_forever() -> None:
    """Collect orphans, as process 1 must."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigtimedwait({signal.SIGCHLD}, 5)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    make_file_system(directory)
    (directory / "init.ready").touch()
    reap_forever()
