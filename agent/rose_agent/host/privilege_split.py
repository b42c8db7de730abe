"""From one root process to two: the helper, which stays root, and the host, which does not.

This is the verb's entry. With ``--host-uid`` the helper is started first; then this process gives
up its groups, its user, every capability and the way to new ones, and only then loads what talks
to anybody. Without it, or without root, the host does everything itself.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

from rose_agent.host.arguments import parser
from rose_agent.tap.kernel import keep_capabilities

_PR_CAPBSET_DROP = 24
_HELPER = "rose_agent.host.helper.serve"


def main(argv: list[str]) -> int:
    """Entry of the verb ``rose engine-host``.

    Returns:
        The host's exit code.
    """
    arguments = parser().parse_args(argv)
    helper = None
    if arguments.host_uid and os.geteuid() == 0 and not arguments.thaw_all:
        helper = begin(argv)
        lower(arguments.host_uid)
    from rose_agent.host import main as host  # noqa: PLC0415  # only now: nothing of it was root

    return host.main(argv, helper)


def begin(argv: list[str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the helper.

    Returns:
        The host's end of their socket pair, and the helper's process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        helper = subprocess.Popen(
            [sys.executable, "-m", _HELPER, str(theirs.fileno()), *argv],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours, helper


def lower(uid: int) -> None:
    """Become a user without a right; there is no way back.

    Raises:
        OSError: a step failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in range(last + 1):
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    keep_capabilities()
    os.environ["HOME"] = "/"
