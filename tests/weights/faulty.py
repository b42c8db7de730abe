"""A disk that fails: full, or dead in the middle of any single operation, with a power loss."""

from __future__ import annotations

import errno
from pathlib import Path

from rose_weights.disk import Disk


class Crash(BaseException):
    """The process is gone; nothing may catch this."""


class FaultyDisk(Disk):
    """Does ``at`` operations, then fails for ever; what was not synced dies with the power.

    Args:
        at: number of operations that still work; None = all.
        full: fail with "no space left" instead of dying.
    """

    def __init__(self, at: int | None = None, *, full: bool = False) -> None:
        self._left = at
        self._full = full
        self.operations = 0
        self._volatile: set[Path] = set()

    def write(self, path: Path, data: bytes | memoryview, *, durable: bool) -> None:
        if self._fails():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.torn").write_bytes(data[: len(data) // 2])
            self._fail()
        # Without the kernel's own sync: this disk itself decides what survives.
        super().write(path, data, durable=False)
        if not durable:
            self._volatile.add(path)

    def sync(self, path: Path) -> None:
        if self._fails():
            self._fail()
        self._volatile.discard(path)

    def sync_folder(self, folder: Path) -> None:
        if self._fails():
            self._fail()

    def lose_power(self) -> None:
        """Tear every file that was not synced, as a power loss may."""
        for path in self._volatile:
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))

    def _fails(self) -> bool:
        self.operations += 1
        return self._left is not None and self.operations > self._left

    def _fail(self) -> None:
        if self._full:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise Crash
