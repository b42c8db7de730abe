"""A folder of pages of keys and values: written whole or not at all, read whole and right or not.

One page is one file, named by what it holds. Several engines write and read the same folder, and
any of them may be killed at any moment, so a page is written aside and renamed, and its first bytes
are a checksum over name and content: what was torn, changed or put under another name is removed
and counts as not there. It finds accidents, not attackers: who may write here is who may compute
for the lease.

The folder holds so many bytes; pages that were used longest ago go first, of all writers. Next
step: ``sglang.kv_backend`` offers it to SGLang, ``pool_process`` brings pages of other nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER_VARIABLE, BYTES_VARIABLE = "ROSE_KV_STORE", "ROSE_KV_STORE_BYTES"

CHECKSUM_BYTES = 16
_SUFFIX = ".page"
_MODE = 0o660  # the lease's other engines mark what they use
# Files are counted anew after this share of the bound was written: others write here too.
_COUNT_AFTER = 64


class PageFolder:
    """The pages of one lease on this node, as one engine sees them.

    Args:
        folder: made by the engine host.
        most_bytes: of all its pages together.
        checksum: of name and content, ``CHECKSUM_BYTES`` long.
    """

    def __init__(
        self, folder: Path, most_bytes: int, checksum: Callable[[bytes, memoryview], bytes]
    ) -> None:
        self._folder, self._most, self._checksum = folder, most_bytes, checksum
        self._lock = threading.Lock()
        self._uncounted: int | None = None  # None = nothing has been counted yet
        self._used = 0

    def has(self, name: str) -> bool:
        """Whether there is such a page; it may still prove to be damaged."""
        try:
            return self._path(name).exists()
        except OSError:  # a folder that may no longer be entered
            return False

    def put(self, name: str, content: memoryview) -> bool:
        """Write a page, unless it is there; False = there is no room, or the folder is gone."""
        path = self._path(name)
        size = CHECKSUM_BYTES + len(content)
        if self.has(name):
            return True
        if size > self._most or not self._make_room(size):
            return False
        aside = self._folder / f".{os.getpid()}-{threading.get_ident()}-{name}"[:250]
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                os.fchmod(file.fileno(), _MODE)
                _write(file.fileno(), memoryview(self._checksum(name.encode(), content)))
                _write(file.fileno(), content)
            aside.rename(path)
        except OSError as error:
            log.warning("rose: a page of keys was not kept: %s", error)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            return False
        return True

    def get(self, name: str, into: memoryview) -> bool:
        """Read a page; False = it is not there or not what it should be, ``into`` is then junk."""
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as file:
                checksum = file.read(CHECKSUM_BYTES)
                whole = _read(file.fileno(), into) and not file.read(1)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("rose: a page of keys cannot be read: %s", error)
            return False
        if not whole or checksum != self._checksum(name.encode(), into):
            log.warning("rose: %s is damaged; its tokens are computed", path.name)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return False
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return True

    def _path(self, name: str) -> Path:
        return self._folder / (name + _SUFFIX)

    def _make_room(self, size: int) -> bool:
        """Count the page; where too much is there, remove what was used longest ago."""
        with self._lock:
            if self._uncounted is None or self._uncounted + size > self._most // _COUNT_AFTER:
                self._used, self._uncounted = self._trim(size), 0
            self._uncounted += size
            self._used += size
            return self._used <= self._most

    def _trim(self, size: int) -> int:
        """Bytes that are left once a share of the bound is free again."""
        pages = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    seen = entry.stat(follow_symlinks=False)
                    pages.append((seen.st_mtime_ns, seen.st_size, entry.path))
        used = sum(one[1] for one in pages)
        target = self._most - max(size, self._most // _COUNT_AFTER)
        for _, bytes_, path in sorted(pages):
            if used <= target:
                break
            with contextlib.suppress(OSError):
                Path(path).unlink(missing_ok=True)
                used -= bytes_
        return used


def _write(descriptor: int, content: memoryview) -> None:
    rest = content.cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, into: memoryview) -> bool:
    rest = into.cast("B")
    while rest:
        got = os.readv(descriptor, [rest])
        if not got:
            return False
        rest = rest[got:]
    return True
