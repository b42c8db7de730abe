"""What an engine is doing, in a file that its starter can read while the engine is busy or frozen.

Only engines on a GPU write it: there a freeze in the middle of the driver's work could keep locks
that serving needs (``rose_core.guard.freezing``). The file lies in the one folder that the engine
may write, so a reader trusts nothing about it but a word; whatever else it finds means that the
engine says nothing.

    0    8  magic  "ROSEACT" and the version byte 1
    8  8*N  one word for each rank: 0 there is none, 1 starting, 2 iterating, 3 resting

A rank takes the first free word. Of several ranks the least restful counts, and an iteration is one
that they compute *together* (4): none may be frozen while the others wait for its half. Readers use
``pread`` and no map: a file that shrinks under a map would end the reader. Standard library only:
the file is imported inside engines. Next step: ``rose_engines.sglang.checkpoints`` writes it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path

MAGIC = b"ROSEACT\x01"
VARIABLE = "ROSE_ACTIVITY"
STARTING, ITERATING, RESTING = 1, 2, 3
TOGETHER = 4
# One node has no more GPUs.
_RANKS = 64
SIZE = len(MAGIC) + 8 * _RANKS
_WORDS = struct.Struct(f"={_RANKS}q")


class ActivityBoard:
    """One rank's activity, a word of shared memory.

    Raises:
        OSError: the file cannot be made, or has no word left.
    """

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_size != SIZE:
                os.ftruncate(handle, 0)
                os.write(handle, MAGIC.ljust(SIZE, b"\0"))
            self._memory = mmap.mmap(handle, SIZE)
            # A memoryview of native 8-byte integers stores a whole word at a time.
            self._words = memoryview(self._memory).cast("q")
            free = (at for at in range(1, _RANKS + 1) if not self._words[at])
            self._at = next(free, 0)
            if not self._at:
                raise OSError(f"{path} has no word left for another rank")
            self.write(STARTING)
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # the map keeps the open file, and with it the lock
            os.close(handle)

    def write(self, state: int) -> None:
        """Write what this rank does from now on."""
        self._words[self._at] = state


def read(path: Path) -> int:
    """The least restful word of an engine's ranks; 0 = it says nothing that is understood."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return 0
        text = os.pread(handle, SIZE + 1, 0)
    except OSError:
        return 0
    finally:
        os.close(handle)
    if len(text) != SIZE or not text.startswith(MAGIC):
        return 0
    words = [word for word in _WORDS.unpack_from(text, len(MAGIC)) if word]
    if not words or not {STARTING, ITERATING, RESTING}.issuperset(words):
        return 0
    least = min(words)
    return TOGETHER if least == ITERATING and len(words) > 1 else least
