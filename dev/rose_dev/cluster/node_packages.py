"""What the node needs from the distribution: container runtime, CNI plugins, packet filter tools.

On Debian and Ubuntu, as root, missing ones are installed; elsewhere the error names them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rose_dev.errors import NotSupported
from rose_dev.shell import run

COMMANDS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "ipset": "ipset",
    "nft": "nftables",
    "conntrack": "conntrack",
    "modprobe": "kmod",
    "busybox": "busybox-static",
    "ethtool": "ethtool",
    "socat": "socat",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
"""A command (or file) and the Debian package that brings it."""

_INSTALL_SECONDS = 600.0
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"

Log = Callable[[str], None]


def missing_packages() -> list[str]:
    """Debian packages whose command is not on this machine."""
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
    return sorted(
        {
            package
            for command, package in COMMANDS.items()
            if (not Path(command).is_absolute() and shutil.which(command, path=path) is None)
            or (Path(command).is_absolute() and not Path(command).exists())
        }
    )


def install_packages(log: Log = print) -> None:
    """Install what is missing.

    Raises:
        NotSupported: something is missing and this is not Debian or Ubuntu.
        CommandFailed: the installation failed.
    """
    missing = missing_packages()
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        message = f"the node needs these packages (Debian's names): {names}; install them"
        raise NotSupported(message)
    log(f"[cluster] installing {names}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = "-oDPkg::Lock::Timeout=300"
    run(["apt-get", wait, "-qq", "update"], seconds=_INSTALL_SECONDS, env=environment)
    command = ["apt-get", wait, "-qq", "-y", "--no-install-recommends", "install", *missing]
    run(command, seconds=_INSTALL_SECONDS, env=environment)
