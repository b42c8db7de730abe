"""SGLang's load snapshot: shared memory that the scheduler writes after every batch.

Found through the scheduler's own memory maps, never by name: SIGTERM leaves old files behind, and
an old file reads as a valid load. Reading costs the engine nothing.

The file lives in the pod's mount namespace and belongs to the pod: it may be a link, a pipe, a
device, sparse and huge, or shrink while it is read. So

1. ``open_snapshot`` walks there from the process's root without following a link, waits for
   nothing, and takes regular files only. It needs CAP_SYS_PTRACE; ``confined`` runs it in a process
   that lives for one opening.
2. ``Snapshot`` reads a few KiB by ``pread``: never mapped, so that a file that shrinks is a short
   read and not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from rose_agent.os.processes import LONGEST_MAPS, PROC, proc_text
from rose_core.telemetry.dialects import Figures, sglang_snapshot

_NAME = "sglang_loads_"
# A rank's load is some 600 bytes; the engine reserves 4 KiB for it.
LARGEST_SNAPSHOT = 64 * 1024


def mapped(maps: str) -> str | None:
    """Path of the snapshot in a ``/proc/PID/maps`` text; None when there is none."""
    for line in maps.splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and _NAME in parts[5] and "(deleted)" not in parts[5]:
            return parts[5]
    return None


def open_snapshot(pid: int, proc: Path = PROC) -> int | None:
    """A descriptor of the snapshot that this scheduler has mapped.

    Args:
        pid: the scheduler.
        proc: root of the proc file system.

    Returns:
        A file descriptor, the caller's to close; None when there is no such file, it may not be
        opened, or it is no regular file.
    """
    try:
        path = mapped(proc_text(pid, "maps", proc=proc, most=LONGEST_MAPS))
        return None if path is None else _open_below(proc / str(pid) / "root", path)
    except (OSError, ValueError):
        return None


def _open_below(root: Path, path: str) -> int | None:
    """Open ``path`` as the process at ``root`` sees it; a link on the way ends it.

    An absolute link would be resolved from *our* root, and so lead to our own files.

    Raises:
        OSError: it cannot be opened so.
    """
    *folders, name = [part for part in path.split("/") if part]
    if ".." in (*folders, name):
        return None
    here = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=here)
            os.close(here)
            here = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = os.open(name, flags, dir_fd=here)
    finally:
        os.close(here)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    return None


class Snapshot:
    """An open snapshot.

    Args:
        descriptor: of ``open_snapshot``; closed by ``close``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> Figures:
        """Current figures; unknown when they cannot be read or are none."""
        return sglang_snapshot(self.raw())

    def raw(self) -> bytes:
        """Its first bytes; none when it cannot be read."""
        with contextlib.suppress(OSError):
            return os.pread(self._descriptor, LARGEST_SNAPSHOT, 0)
        return b""

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
