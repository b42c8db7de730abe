"""Content-addressed blocks in a folder: the name is the SHA-256 of the content.

``blocks/<first two digits>/<64 digits>``. A block is written once and never changed, so there is
nothing to lock; a damaged file is found by its name when it is read and is then removed, so that
the next publish or fetch brings it again. A file's time of access says when it was last in use, its
time of change that its bytes are still those that were checked.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rose_core.delta import name_of
from rose_weights.disk import Disk
from rose_weights.errors import Damaged, Incomplete

NAME_BYTES = 32


class Blocks:
    """The blocks of one store or cache."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.folder = folder
        self._root = str(
            folder
        )  # building paths part by part costs as much as reading small blocks
        self._disk = disk or Disk()
        # What this process has checked (and the file's time of change then) and synced. A file from
        # before it started may have been torn by a power loss, so its name alone proves nothing.
        self._checked: dict[bytes, int] = {}
        self._durable: set[bytes] = set()

    def path(self, name: bytes) -> Path:
        """Where a block is or would be.

        Raises:
            Incomplete: the name is no SHA-256, so there can be no such block.
        """
        return Path(self._where(name))

    def _where(self, name: bytes) -> str:
        if len(name) != NAME_BYTES:
            message = f"{name[:40]!r} is no name of a block"
            raise Incomplete(message)
        text = name.hex()
        return f"{self._root}/{text[:2]}/{text}"

    def put(self, data: bytes | memoryview) -> bytes:
        """Keep a block; it survives a power loss only after ``sync``.

        Returns:
            Its name.

        Raises:
            OSError: the disk is full or broken.
        """
        name = name_of(data)
        path = self.path(name)
        if not self._intact(name):
            self._disk.write(path, data, durable=False)
            self._durable.discard(name)
            self._checked[name] = path.stat().st_mtime_ns
        return name

    def get(self, name: bytes) -> bytes:
        """A block's bytes, checked.

        Raises:
            Incomplete: it is not here.
            Damaged: its bytes have changed; the file has been removed.
        """
        return self._open(name, check=True)

    def read(self, names: Sequence[bytes], *, check: bool = True) -> list[bytes]:
        """Several blocks.

        Args:
            names: of the blocks.
            check: False does not hash again what was intact and whose file was not written since.

        Raises:
            Incomplete, Damaged: as ``get``.
        """
        return [self._open(name, check=check) for name in names]

    def _open(self, name: bytes, *, check: bool) -> bytes:
        try:
            data, changed = _contents(self._where(name))
        except OSError as error:
            self._checked.pop(name, None)
            message = f"block {name.hex()[:16]} is not here ({error.strerror})"
            raise Incomplete(message) from error
        if not check and self._checked.get(name) == changed:
            return data
        if name_of(data) != name:
            self._forget(name)
            message = f"block {name.hex()[:16]} is damaged on disk and has been removed"
            raise Damaged(message)
        self._checked[name] = changed
        return data

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Those that are not here intact; marks the others as in use, so ``sweep`` spares them."""
        listed = list(names)
        self.mark(listed)
        return [name for name in listed if not self._intact(name)]

    def mark(self, names: Iterable[bytes]) -> None:
        """These are in use; those that are not here are forgotten."""
        for name in names:
            path = self.path(name)
            try:
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            except OSError:
                self._forget(name)

    def sync(self, names: Iterable[bytes]) -> None:
        """Make these blocks survive a power loss."""
        waiting = set(names) - self._durable
        for name in waiting:
            self._disk.sync(self.path(name))
        for folder in {self.path(name).parent for name in waiting}:
            self._disk.sync_folder(folder)
        self._durable |= waiting

    def sweep(self, needed: Collection[bytes], grace_seconds: float) -> int:
        """Remove blocks nobody needs; recent ones stay, their manifest may be on its way.

        Returns:
            Bytes set free.
        """
        oldest = time.time() - grace_seconds
        freed = 0
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError, ValueError):
                status = path.stat()
                # Half-written files of a crashed process start with a dot.
                forgotten = path.name.startswith(".") or bytes.fromhex(path.name) not in needed
                if forgotten and _used(status) < oldest:
                    path.unlink()
                    freed += status.st_size
        for name in self._checked.keys() - set(needed):
            self._checked.pop(name, None)
        self._durable.intersection_update(needed)
        return freed

    def trim(self, keep_bytes: int) -> int:
        """Remove the longest unused blocks until at most ``keep_bytes`` are left.

        Returns:
            Bytes set free.
        """
        files = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((_used(status), status.st_size, path))
        over = sum(size for _, size, _ in files) - keep_bytes
        freed = 0
        for _, size, path in sorted(files):
            if freed >= over:
                break
            path.unlink(missing_ok=True)
            with contextlib.suppress(ValueError):
                self._checked.pop(bytes.fromhex(path.name), None)
                self._durable.discard(bytes.fromhex(path.name))
            freed += size
        return freed

    def _intact(self, name: bytes) -> bool:
        """Whether the block is here; a damaged file is removed. Each is read once."""
        if name in self._checked:
            return True
        try:
            self.get(name)
        except (Incomplete, Damaged):
            return False
        return True

    def _forget(self, name: bytes) -> None:
        self.path(name).unlink(missing_ok=True)
        self._checked.pop(name, None)
        self._durable.discard(name)


def _used(status: os.stat_result) -> float:
    """When a block was last in use."""
    return max(status.st_atime, status.st_mtime)


def _contents(path: str) -> tuple[bytes, int]:
    """A file's bytes, and when they were last changed. In one call where it can: most are small."""
    handle = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(handle)
        data = os.read(handle, status.st_size)
        if len(data) == status.st_size:
            return data, status.st_mtime_ns
        # One call gives 2 GiB at most, and a sandbox's memory may be a block of more.
        pieces, left = [data], status.st_size - len(data)
        while left and (piece := os.read(handle, left)):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces), status.st_mtime_ns
    finally:
        os.close(handle)
