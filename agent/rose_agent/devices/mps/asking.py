"""How the stand-in for NVIDIA's MPS daemon is asked: by a process that imports next to nothing.

A host asks its daemon dozens of times, each time by a process of its own, since NVIDIA's program is
one. With ``fake`` as that process most of the CPU time of such tests went into its imports. So this
file runs by itself (``PROGRAM``), without packages; what is no question becomes ``fake``.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

PROGRAM = (sys.executable, "-IS", __file__)
"""In the place of ``nvidia-cuda-mps-control``."""
MOST = 1 << 16
"""Bytes of a command or an answer: each is one packet."""


def control_socket() -> str:
    """Of the daemon that this process's environment names."""
    # NVIDIA's default.
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108
    return os.path.join(folder, "control")  # noqa: PTH118  # pathlib is a third of the start


def send(place: str | os.PathLike[str], line: str) -> str:
    """One command to the daemon behind ``place``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.fspath(place))
        connection.sendall(f"{line}\n".encode())
        return connection.recv(MOST).decode()


def ask(argv: Sequence[str]) -> int:
    """Print the answers to what the arguments ask, or else the lines of the input.

    Returns:
        Exit code.
    """
    operands = ["quit"] if list(argv) == ["-q"] else argv
    given = [" ".join(operands)] if operands else sys.stdin
    for line in filter(None, map(str.strip, given)):
        try:
            sys.stdout.write(send(control_socket(), line))
        except OSError:
            sys.stdout.write("Cannot find MPS control daemon process\n")
            return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["-f"] or sys.argv[1:] == ["--help"]:
        fake = [sys.executable, "-m", "rose_agent.devices.mps.fake", *sys.argv[1:]]
        os.execv(sys.executable, fake)  # noqa: S606  # itself
    sys.exit(ask(sys.argv[1:]))
