"""Subvolumes, by the kernel's own calls: a program for each of them takes longer than its work.

Next step: ``volume`` gives them names.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose_sandbox.runtimes import kernel

# linux/btrfs.h: calls 14, 15, 23 (4096 bytes in) and 43 (48 bytes) of 0x94.
_CREATE, _DESTROY, _SNAPSHOT, _LIMIT = 0x5000940E, 0x5000940F, 0x50009417, 0x8030942B
_ARGUMENTS = struct.Struct("=q4088s")
_SNAPSHOT_ARGUMENTS = struct.Struct("=qQQ32x4040s")
_LIMIT_ARGUMENTS = struct.Struct("=QQQQQQ")
_MOST_REFERENCED = 1


def create(folder: Path) -> None:
    """A fresh subvolume.

    Raises:
        OSError: it is there, or the disk is full.
    """
    with _opened(folder.parent) as parent:
        kernel.control(parent, _CREATE, _ARGUMENTS.pack(0, os.fsencode(folder.name)))


def snapshot(source: Path, folder: Path) -> None:
    """A subvolume that begins as another is now.

    Raises:
        OSError: it is there, or the disk is full.
    """
    with _opened(source) as begun, _opened(folder.parent) as parent:
        arguments = _SNAPSHOT_ARGUMENTS.pack(begun, 0, 0, os.fsencode(folder.name))
        kernel.control(parent, _SNAPSHOT, arguments)


def delete(folder: Path) -> None:
    """Remove a subvolume and all that is in it.

    Raises:
        OSError: it is not there.
    """
    with _opened(folder.parent) as parent:
        kernel.control(parent, _DESTROY, _ARGUMENTS.pack(0, os.fsencode(folder.name)))


def limit(folder: Path, size: int) -> None:
    """What a subvolume may hold, bytes.

    Raises:
        OSError: its file system counts no sizes (quotas are off).
    """
    with _opened(folder) as opened:
        # Group 0 is the folder's own.
        arguments = _LIMIT_ARGUMENTS.pack(0, _MOST_REFERENCED, size, 0, 0, 0)
        kernel.control(opened, _LIMIT, arguments)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
