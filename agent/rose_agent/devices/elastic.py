"""Memory that an engine gives back by degrees: an interface, and kvcached behind it.

kvcached keeps one small segment per engine in ``/dev/shm``: three 64-bit words, the limit, the
bytes in use, and the bytes mapped ahead of need. Whoever writes the first word limits the engine,
which looks ten times a second and obeys at its next allocation. Words are written under the file's
lock (``flock``, which kvcached takes as well, since it writes all three); a frozen engine may hold
that lock, so it is tried and not waited for. Reading needs none: each word is whole by itself.

The file belongs to the engine's user, who is not trusted: links are not followed, and a file that
is not a plain one of that user's is no segment. Several pools in one engine (hybrid attention) have
a segment each, of which we would steer the first alone, so that counts as unknown.

``rose_engines.fake.kvcached`` is the other side without a GPU. Next step:
``rose_agent.host.memory.elastic``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from rose_agent.errors import QueryFailed
from rose_core.devices.elastic import PoolSeen

SHM = Path("/dev/shm")  # noqa: S108  # kvcached's place
_COUNTERS = struct.Struct("=qqq")
_LIMIT = struct.Struct("=q")


class ElasticMemory(Protocol):
    """An engine's memory that can be limited while it runs."""

    def read(self) -> PoolSeen | None:
        """Its figures now; None = unknown."""
        ...

    def limit(self, size: int) -> bool:
        """Order a limit, bytes; what becomes of it shows in the figures.

        Returns:
            False when it could not be written now.

        Raises:
            QueryFailed: there is no such memory.
        """
        ...

    def forget(self) -> None:
        """The engine has ended; remove what it left."""
        ...


class KvcachedSegment:
    """kvcached's segment of one engine.

    Args:
        name: ``KVCACHED_IPC_NAME`` of the engine.
        owner: user of the engine; None = ours.
        folder: where segments lie.
    """

    def __init__(self, name: str, owner: int | None = None, folder: Path = SHM) -> None:
        self._path = folder / name
        self._owner = os.geteuid() if owner is None else owner

    def read(self) -> PoolSeen | None:
        """None without a segment, with one that is no pool's, or with more than one."""
        if any(self._path.parent.glob(f"{self._path.name}_g*")):
            return None
        try:
            with self._opened(os.O_RDONLY) as file:
                limit, used, spare = _COUNTERS.unpack(os.pread(file, _COUNTERS.size, 0))
        except (OSError, QueryFailed, struct.error):
            return None
        return PoolSeen(limit, used, spare) if limit > 0 and min(used, spare) >= 0 else None

    def limit(self, size: int) -> bool:
        """Write the pool's limit, bytes.

        Returns:
            False while another process holds the lock: nothing was written.

        Raises:
            QueryFailed: the segment cannot be opened or written.
        """
        try:
            with self._opened(os.O_RDWR) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.pwrite(file, _LIMIT.pack(size), 0)
        except BlockingIOError:
            return False
        except OSError as error:
            raise QueryFailed(f"{self._path}: {error.strerror}") from error
        return True

    def forget(self) -> None:
        """A killed engine cannot remove it."""
        for path in (self._path, *self._path.parent.glob(f"{self._path.name}_g*")):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened(self, mode: int) -> Iterator[int]:
        """The file, closed and thereby unlocked afterwards.

        Raises:
            OSError: it cannot be opened.
            QueryFailed: it is not the engine's.
        """
        file = os.open(self._path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            seen = os.fstat(file)
            plain = stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1
            if not plain or seen.st_uid != self._owner or seen.st_size < _COUNTERS.size:
                raise QueryFailed(f"{self._path} is no segment of user {self._owner}")
            yield file
        finally:
            os.close(file)
