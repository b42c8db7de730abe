"""The few system calls of the tap that Python 3.11 does not offer."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def setns(descriptor: int) -> None:
    """Enter the network namespace behind the descriptor (this thread only).

    Raises:
        OSError: EPERM without CAP_SYS_ADMIN.
    """
    _check(_libc.setns(descriptor, _CLONE_NEWNET), "setns")


def leave_network() -> None:
    """Move into a new, empty network namespace; sockets that are open stay where they are.

    Raises:
        OSError: EPERM without CAP_SYS_ADMIN.
    """
    _check(_libc.unshare(_CLONE_NEWNET), "unshare")


def die_with_parent(signal_number: int) -> None:
    """Receive the signal when the parent process ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl(PDEATHSIG)")


def no_dumps() -> None:
    """No core dumps, no ptrace by processes of the same user: packets pass through this memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(DUMPABLE)")


def drop_capabilities() -> None:
    """Give up every capability for good: effective, permitted, inheritable; no new privileges."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    _check(_libc.capset(header, data), "capset")
