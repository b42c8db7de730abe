"""The permit: a deadline in shared memory that a rollout engine may compute before.

The guard must be able to stop rollouts by *doing nothing*: it extends the deadline a little at a
time, and when it hangs, dies or simply decides so, the deadline passes. Beside the deadline lies
the engine host's heartbeat, so that the guard can tell that it is gone. Who writes what:

    guard        the deadline and the chunks' divisor
    engine host  its own heartbeat (and the deadline of dedicated engines, which have no guard)
    engine       nothing; it attaches read-only and stops between iterations

Layout of the 64 bytes, native byte order of one machine, version in the last byte of the magic:

    0   8  magic  "ROSEPMT" and the version byte 1
    8   8  deadline, CLOCK_MONOTONIC nanoseconds; 0 = closed
    16  8  zero
    24  8  last heartbeat of the engine host, same clock; 0 = never
    32  8  lane: which of a slot's engines the deadline is for; 0 = the first
    40  8  what the engine's prefill chunks are divided by; 0 = 1
    48  16 zero

Two engines of one slot share this memory, linked under a name for each lane, so that one store
moves the right to compute from one to the other and no reader finds it open for both.
Every field is one aligned 8-byte word that is stored and loaded by a single instruction, so no
reader ever sees half a value and no lock is needed. Standard library only: the file is imported
inside engines. Next step: ``rose_engines.sglang.plugin`` waits on it, ``rose_engines.node.rundir``
says where it lies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Self

SIZE = 64
MAGIC = b"ROSEPMT\x01"
# A deadline further ahead than this is not one of ours (a leftover of an earlier boot, garbage):
# a dead man's switch that holds for ever would be none.
LONGEST_NS = 10_000_000_000

_DEADLINE, _HOST, _LANE, _DIVISOR = 1, 3, 4, 5
_LARGEST_DIVISOR = 1024  # garbage must not make a chunk of nothing
FIRST_LANE, BUSY_LANE = 0, 1
NAMES = {FIRST_LANE: "permit", BUSY_LANE: "permit-busy"}


class BadPermit(ValueError):
    """The file is no permit of this version."""


class Permit:
    """A mapped permit; see the module for who writes what.

    Use ``Permit.create`` in the engine host and ``Permit.attach`` everywhere else.
    """

    def __init__(self, memory: mmap.mmap, own_lane: int = FIRST_LANE) -> None:
        self._memory = memory
        self._own_lane = own_lane
        self._bytes = memoryview(memory)
        # A memoryview of native 8-byte integers copies a whole word at a time; struct's
        # little-endian formats would store it byte by byte.
        self._words = self._bytes.cast("q")

    @classmethod
    def create(cls, path: Path | str) -> Self:
        """Make a closed permit at ``path`` and map it; an older file there is replaced.

        The file appears complete (rename), readable by everyone who may enter its folder.

        Raises:
            OSError: the folder is missing or full.
        """
        target = Path(path)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC.ljust(SIZE, b"\0"))
                os.fchmod(handle, 0o644)
            temporary.replace(target)
        except BaseException:  # whatever it was, a full folder must not fill up with drafts
            temporary.unlink(missing_ok=True)
            raise
        return cls.attach(target)

    @classmethod
    def attach(cls, path: Path | str, *, writable: bool = True) -> Self:
        """Map an existing permit.

        Args:
            path: the permit's file; its name says which lane the reader is (``NAMES``).
            writable: False for readers (engines), which then need no right to write.

        Raises:
            OSError: the file is not there or may not be opened.
            BadPermit: the file has another size, magic or version.
        """
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        with Path(path).open("r+b" if writable else "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != SIZE:
                raise BadPermit(f"permit {path} has {size} bytes instead of {SIZE}")
            memory = mmap.mmap(file.fileno(), SIZE, access=access)
        magic = memory[: len(MAGIC)]
        if magic != MAGIC:
            memory.close()
            raise BadPermit(f"permit {path} starts with {magic!r}, this version needs {MAGIC!r}")
        return cls(memory, BUSY_LANE if Path(path).name == NAMES[BUSY_LANE] else FIRST_LANE)

    @property
    def until_ns(self) -> int:
        """The deadline, CLOCK_MONOTONIC nanoseconds; 0 when closed."""
        return self._words[_DEADLINE]

    def extend(self, until_ns: int) -> None:
        """Allow computing before ``until_ns`` (at most 10 s ahead counts)."""
        self._words[_DEADLINE] = until_ns

    def close_now(self) -> None:
        """Forbid computing from this moment on."""
        self._words[_DEADLINE] = 0

    @property
    def lane(self) -> int:
        """Which of the slot's engines the deadline is for."""
        return self._words[_LANE]

    def choose(self, lane: int) -> None:
        """From now on the deadline is for this engine of the slot alone."""
        self._words[_LANE] = lane

    @property
    def chunk_divisor(self) -> int:
        """What the engine's prefill chunks are divided by while this permit is open."""
        return min(max(self._words[_DIVISOR], 1), _LARGEST_DIVISOR)

    def divide_chunks(self, divisor: int) -> None:
        """From the next prefill chunk on, chunks are so much shorter than the engine's own."""
        self._words[_DIVISOR] = divisor

    def is_open(self, now_ns: int) -> bool:
        """Whether this reader's engine may compute at ``now_ns``."""
        return self._words[_LANE] == self._own_lane and self.is_open_for_any(now_ns)

    def is_open_for_any(self, now_ns: int) -> bool:
        """Whether one of the slot's engines may compute at ``now_ns``."""
        return now_ns < self._words[_DEADLINE] <= now_ns + LONGEST_NS

    def beat_host(self, now_ns: int) -> None:
        """The engine host lives."""
        self._words[_HOST] = now_ns

    def host_age_ns(self, now_ns: int) -> int | None:
        """Time since the engine host's last heartbeat; None when there was none."""
        beat = self._words[_HOST]
        return max(0, now_ns - beat) if beat else None

    def detach(self) -> None:
        """Unmap; the permit itself goes on. Calling it twice does no harm."""
        self._words.release()
        self._bytes.release()
        self._memory.close()
