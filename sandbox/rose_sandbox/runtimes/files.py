"""A sandbox's files, by a descriptor of its root: links stay inside, owners are its own.

Next step: ``runc`` gives and takes them.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from rose_sandbox.errors import BadPath, TooLarge
from rose_sandbox.runtimes import inside, kernel
from rose_sandbox.runtimes.runtime import FILE_BYTES


def look(root: int, name: str) -> bytes | None:
    """A file of ``inside.FOLDER``, whole; None where there is none."""
    try:
        return read(root, f"{inside.FOLDER}/{name}", FILE_BYTES)
    except (BadPath, TooLarge):
        return None


def read(root: int, path: str, limit: int) -> bytes:
    """A plain file.

    Raises:
        BadPath: it is none.
        TooLarge: it has over ``limit`` bytes.
    """
    try:
        descriptor = kernel.open_in(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise BadPath(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise BadPath(f"{path} is no plain file")
        if facts.st_size > limit:
            raise TooLarge(f"{path} has {facts.st_size} bytes, over {limit}")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise TooLarge(f"{path} has over {limit} bytes")
    return data


def write(root: int, path: str, data: bytes, mode: int) -> None:
    """Write a plain file as this thread's user.

    Raises:
        OSError: as ``open``.
        BadPath: it is none.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = kernel.open_in(root, path, flags, mode)
    with os.fdopen(descriptor, "wb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadPath(f"{path} is no plain file")
        file.write(data)


def put(root: int, path: str, data: bytes, mode: int) -> None:
    """Write a file as the sandbox's root, with the folders above it.

    Raises:
        BadPath: it leads through something that is no folder.
        TooLarge: the disk is full.
    """
    try:
        with kernel.owner(kernel.FIRST_ID):
            above = path.strip("/").split("/")[:-1]
            for depth in range(len(above)):
                _make_folder(root, "/" + "/".join(above[:depth]), above[depth])
            write(root, path, data, mode)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise TooLarge(f"{path}: the sandbox's disk is full") from error
        raise BadPath(f"{path}: {error.strerror}") from error


def _make_folder(root: int, parent: str, name: str) -> None:
    descriptor = kernel.open_in(root, parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def runner_of(root: int, number: str) -> int | None:
    """Process id, in the sandbox, of what runs a command."""
    text = look(root, f"{number}.pid")
    return int(text) if text and text.strip().isdigit() else None


def is_gone(root: int, number: str) -> bool:
    """Whether a command's runner has ended, as far as its own ``/proc`` says."""
    runner = runner_of(root, number)
    if runner is None:
        return False
    try:
        os.close(kernel.open_in(root, f"/proc/{runner}", os.O_PATH))
    except OSError:
        return True
    return False
