"""Files that survive a crash: written beside, synced, renamed, folder synced.

Everything the store writes goes through ``Disk``, so the fault tests can stop the process or fill
the disk before and after each single write.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


class Disk:
    """Durable writes. The order of calls is the order in which data survives."""

    def write(self, path: Path, data: bytes | memoryview, *, durable: bool) -> None:
        """Replace a file in one step; with ``durable`` it survives a power loss from here on.

        Raises:
            OSError: the disk is full or broken; the old content is still there.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with draft.open("wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        if durable:
            self.sync_folder(path.parent)

    def sync(self, path: Path) -> None:
        """Make a file that was written without ``durable`` survive a power loss."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_folder(self, folder: Path) -> None:
        """Make renames inside the folder survive a power loss."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
