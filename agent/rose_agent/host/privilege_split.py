"""From one root process to two: the helper, which stays root, and the host, which does not.

This is the verb's entry. With ``--host-uid`` the helper is started first; then this process gives
up its groups, its user, every capability and the way to new ones, and only then loads what talks
to anybody. Without it, or without root, the host does everything itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rose_agent.os.kernel import keep_capabilities

_PR_CAPBSET_DROP = 24
_HELPER = "rose_agent.host.helper.serve"


def main(argv: list[str]) -> int:
    """Entry of the verb ``rose engine-host``.

    Returns:
        The host's exit code; 2 when what was given is wrong.
    """
    signal.signal(signal.SIGTERM, _leave)  # before all that takes long, imports included
    from rose_agent.host.options import inputs  # noqa: PLC0415
    from rose_agent.host.options.arguments import parser  # noqa: PLC0415

    arguments = parser().parse_args(argv)
    if problem := inputs.problem(arguments, argv):
        sys.stderr.write(f"rose engine-host: {problem}\n")
        return 2
    if not arguments.host_uid or os.geteuid() != 0 or arguments.thaw_all:
        return _host(argv, None)
    helper = begin(argv)
    lower(arguments.host_uid)
    try:
        return _host(argv, helper)
    except ImportError as error:
        sys.stderr.write(
            f"rose engine-host: user {arguments.host_uid} of --host-uid cannot load {error.name}; "
            f"install ROSE and its Python where every user can read them, not in {sys.prefix}\n"
        )
        return 1


def _host(argv: list[str], helper: tuple[socket.socket, subprocess.Popen[bytes]] | None) -> int:
    from rose_agent.host import main as host  # noqa: PLC0415  # only now: nothing of it was root

    return host.main(argv, helper)


def _leave(_number: int, _frame: object) -> None:
    """Told to end before the host listens for it; a first process would not even hear it."""
    raise SystemExit(0)


def begin(argv: list[str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the helper.

    Returns:
        The host's end of their socket pair, and the helper's process.
    """
    own_end, helper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with helper_end:
        helper = subprocess.Popen(
            [sys.executable, "-m", _HELPER, str(helper_end.fileno()), *argv],
            pass_fds=[helper_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return own_end, helper


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
