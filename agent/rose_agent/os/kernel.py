"""The few system calls of the tap that Python 3.11 does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
import sys
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_M_PERTURB = -6
_CAPABILITY_VERSION_3 = 0x20080522
DAC_OVERRIDE, NET_RAW, SYS_PTRACE, SYS_ADMIN = 1, 13, 19, 21
# Landlock (Linux 5.13): the same numbers on every architecture.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_ALL = (1 << 13) - 1  # every right of its first version
_LANDLOCK_READ = 1 << 2 | 1 << 3  # files, folders
_LANDLOCK_PATH_BENEATH = 1
# What Python may still have to load after a process was confined.
LIBRARIES = Path(sys.prefix)


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


def forbid_dumps() -> None:
    """No core dumps, no ptrace by processes of the same user: packets pass through this memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(DUMPABLE)")


def overwrite_freed() -> None:
    """What is freed is overwritten: no copy of a packet stays behind in unused memory.

    Small pieces (below 1 KiB) wait a moment in the allocator's cache first, for the next of their
    size. Only glibc can do it; elsewhere this does nothing.
    """
    with contextlib.suppress(AttributeError):
        _libc.mallopt(_M_PERTURB, 0x5A)


class _Interface(ctypes.Structure):
    """``struct ifaddrs``, as far as it is read here."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def addresses() -> frozenset[str]:
    """IPv4 and IPv6 addresses of the current network namespace as hex digits.

    Raises:
        OSError: the kernel does not tell.
    """
    first = ctypes.POINTER(_Interface)()
    _check(_libc.getifaddrs(ctypes.byref(first)), "getifaddrs")
    found, entry = set(), first
    try:
        while entry:
            if entry.contents.address:
                found.add(_plain(entry.contents.address))
            entry = entry.contents.next
    finally:
        _libc.freeifaddrs(first)
    return frozenset(found - {""})


def _plain(address: int) -> str:
    """The address inside a ``struct sockaddr``; empty for other families."""
    family = ctypes.c_ushort.from_address(address).value
    # Before it: family and port; in IPv6 the flow too.
    if family == socket.AF_INET:
        return ctypes.string_at(address + 4, 4).hex()
    return ctypes.string_at(address + 8, 16).hex() if family == socket.AF_INET6 else ""


def keep_capabilities(kept: frozenset[int] = frozenset()) -> None:
    """Give up every other capability for good, and the way to new ones.

    Effective and permitted are cut to those of ``kept`` that are held, inheritable to none.
    """
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, data), "capget")
    _, permitted, _, _, permitted_high, _ = struct.unpack("6I", data.raw[:24])
    mask = sum(1 << number for number in kept) & (permitted | permitted_high << 32)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, 0, high, high, 0))
    _check(_libc.capset(header, data), "capset")


def forbid(program: bytes) -> None:
    """Put a system call filter on this process for good; ``NO_NEW_PRIVS`` comes first.

    Raises:
        OSError: the kernel has no seccomp, or refuses the program.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    record = ctypes.create_string_buffer(
        struct.pack("HL", len(program) // 8, ctypes.addressof(buffer))
    )
    mode = _SECCOMP_MODE_FILTER
    _check(_libc.prctl(_PR_SET_SECCOMP, mode, record, 0, 0), "prctl(SECCOMP)")


def read_only_below(*folders: Path) -> None:
    """From now on this process opens no file but for reading below these folders (Landlock).

    Raises:
        OSError: the kernel has no Landlock, or a folder is not there.
    """
    handled = ctypes.c_uint64(_LANDLOCK_ALL)
    ruleset = _libc.syscall(_LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    _check(min(ruleset, 0), "landlock_create_ruleset")
    try:
        for folder in folders:
            _allow_reading(ruleset, folder)
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
        _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow_reading(ruleset: int, folder: Path) -> None:
    parent = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        # struct landlock_path_beneath_attr is packed.
        rule = ctypes.create_string_buffer(struct.pack("=Qi", _LANDLOCK_READ, parent))
        added = _libc.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0)
        _check(added, "landlock_add_rule")
    finally:
        os.close(parent)
