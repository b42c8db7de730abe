"""System calls that Python has no function for: links, owners, networks, subvolumes of btrfs.

A path in a sandbox is its tenant's: a link may point anywhere. So every path is resolved by the
kernel with the sandbox's root as its root (``openat2``).
A subvolume is made by a call too: a program for each of them takes longer than its work.
Next step: ``runc`` reads and writes with it, ``volume`` gives subvolumes names.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose_sandbox.runtimes.parts import SYSTEM_PATH

FIRST_ID = 1_000_000_000
"""The host's user that is a sandbox's root: far above what systems and their users count with.

One range for all sandboxes and hosts, so that saved files fit wherever they are restored; from each
other they are kept by their own namespaces and roots, in which nobody sees another's files."""
IDS = 65_536

_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_IDMAP = 0x1, 0x100000
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_CLONE_NEWNET = 0x40000000
_MNT_DETACH = 2
# linux/btrfs.h: calls 14, 15, 23 (4096 bytes in) and 43 (48 bytes) of 0x94.
_SUBVOL_CREATE, _SUBVOL_DESTROY = 0x5000940E, 0x5000940F
_SUBVOL_SNAPSHOT, _SUBVOL_LIMIT = 0x50009417, 0x8030942B
_SUBVOL_ARGUMENTS = struct.Struct("=q4088s")
_SNAPSHOT_ARGUMENTS = struct.Struct("=qQQ32x4040s")
_LIMIT_ARGUMENTS = struct.Struct("=QQQQQQ")
_MOST_REFERENCED = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, *about: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), *about)
    return result


def _call(number: int, *arguments: object) -> int:
    return _checked(int(_libc.syscall(number, *arguments)))


def control(descriptor: int, request: int, arguments: bytes) -> None:
    """``ioctl``, beside which other threads go on, however large its arguments and slow its work.

    Raises:
        OSError: as the request.
    """
    buffer = ctypes.create_string_buffer(arguments, len(arguments))
    _checked(_libc.ioctl(descriptor, ctypes.c_ulong(request), buffer))


def mount_overlay(options: str, target: Path) -> None:
    """Mount layers at a folder.

    Args:
        options: ``lowerdir=...,upperdir=...,workdir=...``.
        target: the folder.

    Raises:
        OSError: a layer is not there, or cannot be one.
    """
    place, layers = os.fsencode(target), os.fsencode(options)
    _checked(_libc.mount(b"overlay", place, b"overlay", 0, layers), str(target))


def unmount(target: Path) -> None:
    """Take a mount away; who still uses it keeps it until the end.

    Raises:
        OSError: nothing is mounted there.
    """
    _checked(_libc.umount2(os.fsencode(target), _MNT_DETACH), str(target))


def open_in(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path below a folder, which its links cannot leave; returns a descriptor.

    Raises:
        OSError: as ``open``.
    """
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    buffer = ctypes.create_string_buffer(how, len(how))
    return _call(_OPENAT2, root, os.fsencode(path), buffer, len(how))


@contextmanager
def owner(uid: int) -> Iterator[None]:
    """This thread makes files as that user, which a mapped file system asks for."""
    _libc.setfsgid(uid)
    _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(0)


def mount_mapped(source: Path, target: Path) -> None:
    """Mount a folder read-only at another, its owners 0.. shown as ``FIRST_ID``...

    Raises:
        OSError: the kernel or the file system has no mapped mounts.
    """
    # A program and no fork of this process: libraries such as gRPC begin threads in a child of
    # theirs, and one with threads gets no namespace.
    child = subprocess.Popen(
        ["unshare", "--user", "sh", "-c", "echo y; exec cat"],
        env={"PATH": SYSTEM_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        if child.stdout is None or child.stdout.readline() != b"y\n":
            raise OSError(errno.EPERM, "no user namespaces here")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child.pid}/{name}").write_text(f"0 {FIRST_ID} {IDS}")
        namespace = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            tree = _call(
                _OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC
            )
            try:
                attributes = struct.pack(
                    "QQQQ", _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY, 0, 0, namespace
                )
                buffer = ctypes.create_string_buffer(attributes, len(attributes))
                _call(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, buffer, len(attributes))
                _call(
                    _MOVE_MOUNT,
                    *(tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH),
                )
            finally:
                os.close(tree)
        finally:
            os.close(namespace)
    finally:
        child.kill()
        child.communicate()


def socket_of(pid: int) -> socket.socket:
    """A TCP socket in the network of a process; call it in a thread of its own, which it spoils.

    Raises:
        OSError: the process is gone.
    """
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(namespace, _CLONE_NEWNET))
    finally:
        os.close(namespace)
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def create_subvolume(folder: Path) -> None:
    """A fresh subvolume.

    Raises:
        OSError: it is there, or the disk is full.
    """
    with _opened(folder.parent) as parent:
        control(parent, _SUBVOL_CREATE, _SUBVOL_ARGUMENTS.pack(0, os.fsencode(folder.name)))


def snapshot_subvolume(source: Path, folder: Path) -> None:
    """A subvolume that begins as another is now.

    Raises:
        OSError: it is there, or the disk is full.
    """
    with _opened(source) as begun, _opened(folder.parent) as parent:
        arguments = _SNAPSHOT_ARGUMENTS.pack(begun, 0, 0, os.fsencode(folder.name))
        control(parent, _SUBVOL_SNAPSHOT, arguments)


def delete_subvolume(folder: Path) -> None:
    """Remove a subvolume and all that is in it.

    Raises:
        OSError: it is not there.
    """
    with _opened(folder.parent) as parent:
        control(parent, _SUBVOL_DESTROY, _SUBVOL_ARGUMENTS.pack(0, os.fsencode(folder.name)))


def limit_subvolume(folder: Path, size: int) -> None:
    """What a subvolume may hold, bytes.

    Raises:
        OSError: its file system counts no sizes (quotas are off).
    """
    with _opened(folder) as opened:
        # Group 0 is the folder's own.
        arguments = _LIMIT_ARGUMENTS.pack(0, _MOST_REFERENCED, size, 0, 0, 0)
        control(opened, _SUBVOL_LIMIT, arguments)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
