"""SGLang's load snapshot: shared memory that the scheduler writes after every batch.

Found through the scheduler's own memory maps, never by name: SIGTERM leaves old files behind, and
an old file reads as a valid load. Reading costs the engine nothing. The file lives in the pod's
mount namespace, so it is opened through ``/proc/PID/root`` (needs CAP_SYS_PTRACE); where that is
refused the source is simply absent.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from rose_core.telemetry.dialects import Figures, sglang_snapshot

_NAME = "sglang_loads_"


def mapped(maps: str) -> str | None:
    """Path of the snapshot in a ``/proc/PID/maps`` text; None when there is none."""
    for line in maps.splitlines():
        if _NAME in line and "(deleted)" not in line:
            return line.split(maxsplit=5)[5]
    return None


class Snapshot:
    """The snapshot of one scheduler process.

    Args:
        pid: the scheduler.
        proc: root of the proc file system.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._memory: mmap.mmap | None = None

    def read(self) -> Figures:
        """Current figures; unknown when there is no snapshot or it may not be read."""
        if not self._folder.exists():
            self.close()
            return Figures()
        if self._memory is None and not self._open():
            return Figures()
        assert self._memory is not None  # noqa: S101  # opened above
        return sglang_snapshot(self._memory[:])

    def close(self) -> None:
        """Unmap."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _open(self) -> bool:
        try:
            path = mapped((self._folder / "maps").read_text())
            if path is None:
                return False
            with (self._folder / "root" / path.lstrip("/")).open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return False
        return True
