"""Content-addressed blocks in a folder: the name is the SHA-256 of the content.

``blocks/<first two digits>/<64 digits>``. A block is written once and never changed, so there is
nothing to lock; a damaged file is found by its name when it is read and is then removed, so that
the next publish or fetch brings it again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from rose_core.delta import name_of
from rose_weights.disk import Disk
from rose_weights.errors import Damaged, Incomplete

NAME_BYTES = 32


class Blocks:
    """The blocks of one store or cache."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.folder = folder
        self._disk = disk or Disk()
        # What this process has checked and synced. A file from before it started may have been
        # torn by a power loss, so its name alone proves nothing.
        self._checked: set[bytes] = set()
        self._durable: set[bytes] = set()

    def path(self, name: bytes) -> Path:
        """Where a block is or would be.

        Raises:
            Incomplete: the name is no SHA-256, so there can be no such block.
        """
        if len(name) != NAME_BYTES:
            message = f"{name[:40]!r} is no name of a block"
            raise Incomplete(message)
        text = name.hex()
        return self.folder / text[:2] / text

    def put(self, data: bytes) -> bytes:
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
            self._checked.add(name)
        return name

    def get(self, name: bytes) -> bytes:
        """A block's bytes, checked.

        Raises:
            Incomplete: it is not here.
            Damaged: its bytes have changed; the file has been removed.
        """
        path = self.path(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            message = f"block {name.hex()[:16]} is not here ({error.strerror})"
            raise Incomplete(message) from error
        if name_of(data) != name:
            self._forget(name)
            message = f"block {name.hex()[:16]} is damaged on disk and has been removed"
            raise Damaged(message)
        return data

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Those that are not here intact; marks the others as in use, so ``sweep`` spares them."""
        absent = []
        for name in names:
            try:
                os.utime(self.path(name))
            except OSError:
                self._forget(name)
            if not self._intact(name):
                absent.append(name)
        return absent

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
                if forgotten and status.st_mtime < oldest:
                    path.unlink()
                    freed += status.st_size
        self._checked.intersection_update(needed)
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
                files.append((status.st_mtime, status.st_size, path))
        over = sum(size for _, size, _ in files) - keep_bytes
        freed = 0
        for _, size, path in sorted(files):
            if freed >= over:
                break
            path.unlink(missing_ok=True)
            with contextlib.suppress(ValueError):
                self._checked.discard(bytes.fromhex(path.name))
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
        self._checked.add(name)
        return True

    def _forget(self, name: bytes) -> None:
        self.path(name).unlink(missing_ok=True)
        self._checked.discard(name)
        self._durable.discard(name)
