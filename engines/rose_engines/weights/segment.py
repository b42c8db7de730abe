"""What a stager found in a bundle, as arrays in one piece of memory, which may be shared.

A row says what one block does, the arrays behind it where and how: six bytes per changed element
of 16 bits. Whoever holds the live weights makes the bits of a delta of its steps in place.
``memory_of`` maps what another process has written: it is sealed, so that nobody shortens it under
the reader or writes into it anew. Next step: ``decoding`` fills a segment, ``staging`` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rose_core.delta import loops
from rose_core.delta.bits import Bits

FIELDS = loops.WHOLE + 1
"""Numbers of a row; ``rose_core.delta.loops`` names them."""
RAW = 2
"""In the place of what is given: the block itself, which is decoded on the live weights. It begins
at ``START`` of the raw bytes, behind ``RAW_HEAD``, and has ``COLUMNS`` of them."""
RAW_HEAD = struct.Struct("<qq")
"""Rows and columns of the tiles that its tensor is cut into."""
WIDTHS = (1, 2, 4, 8)

_ALIGNED = 64
_FUTURE_WRITE = 0x10  # of fcntl(2), since Linux 5.1; Python has no name for it yet
_NOEXEC_SEAL = 0x8  # of memfd_create(2), since Linux 6.3; Python has no name for it before 3.13

Memory = Any
"""Writable memory: whatever numpy makes an array of."""
Room = Callable[[int], Memory]
"""Makes memory of so many bytes, zeros."""


class Sizes(msgspec.Struct, frozen=True, array_like=True):
    """How much of everything there is.

    Attributes:
        rows: blocks.
        touched: tensors that the version changes, on any rank.
        raw: bytes of blocks that are decoded on the live weights.
        places, names: of elements.
        given: elements of each of ``WIDTHS``.
    """

    rows: int
    touched: int
    raw: int
    places: int
    names: int
    given: tuple[int, int, int, int]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(_aligned(np.dtype(kind).itemsize * count) for kind, count in self._regions())

    def _regions(self) -> list[tuple[str, int]]:
        return [
            ("<i8", self.rows * FIELDS),
            ("<u8", self.rows * 2),
            ("<i8", self.touched),
            ("<u8", self.touched * 2),
            ("<i8", self.names),
            ("<u4", self.places),
            ("u1", self.raw),
            *((f"<u{width}", count) for width, count in zip(WIDTHS, self.given, strict=True)),
        ]

    def cut(self, memory: Memory) -> list[npt.NDArray[Any]]:
        """Every region of the memory, in order."""
        found, first = [], 0
        for kind, count in self._regions():
            found.append(np.frombuffer(memory, kind, count, first) if count else np.zeros(0, kind))
            first += _aligned(np.dtype(kind).itemsize * count)
        return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class StagedSegment:
    """Arrays over one piece of memory.

    Attributes:
        rows: what every block does here, in the manifest's order.
        wanted: what each block adds to the digest of its tile, or makes it, where there is no base.
        touched: numbers of tensors that the version changes.
        totals: their digests in the version.
        names: canonical positions of elements of tensors that are held in parts.
        places: of elements, inside what the engine holds.
        raw: blocks that are decoded on the live weights.
        given: new bits or steps, by width.
    """

    rows: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.uint64]
    touched: npt.NDArray[np.int64]
    totals: npt.NDArray[np.uint64]
    names: npt.NDArray[np.int64]
    places: npt.NDArray[np.uint32]
    raw: npt.NDArray[np.uint8]
    given: Mapping[int, Bits]
    nbytes: int

    @classmethod
    def over(cls, memory: Memory, sizes: Sizes) -> StagedSegment:
        """The arrays in a piece of memory that is large enough."""
        rows, wanted, touched, totals, names, places, raw, *given = sizes.cut(memory)
        return cls(
            rows.reshape(-1, FIELDS),
            wanted.reshape(-1, 2),
            touched,
            totals.reshape(-1, 2),
            names,
            places,
            raw,
            dict(zip(WIDTHS, given, strict=True)),
            sizes.nbytes,
        )


def own_memory(nbytes: int) -> Memory:
    """Memory of this process alone."""
    return mmap.mmap(-1, max(nbytes, 1))


def nameless_file(name: str) -> int:
    """Open a file that is in no file system and whose seals can be set.

    Nobody executes it, and it says so: where ``vm.memfd_noexec`` is 2, Linux 6.3 to 6.5 refuse a
    file that does not.

    Args:
        name: what ``/proc`` shows of it.

    Raises:
        OSError: it cannot be made.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)  # an older kernel, which does not know the flag


class SharedMemory:
    """Memory that another process may map: a file that is in no file system and has no name.

    It counts as memory of the process that touches it first, and no mount of ``/dev/shm`` bounds
    it. It is gone when nobody has it open or mapped any more.
    """

    def __init__(self) -> None:
        self.descriptor = nameless_file("rose-stager")
        self._map: mmap.mmap | None = None

    def room(self, nbytes: int) -> Memory:
        """Make it so large.

        Raises:
            OSError: there is not so much.
        """
        os.ftruncate(self.descriptor, max(nbytes, 1))
        self._map = mmap.mmap(self.descriptor, max(nbytes, 1))
        return self._map

    def close(self) -> None:
        """Let go of it; a process that was given it keeps it."""
        with contextlib.suppress(BufferError):  # an array over it lives on for a moment
            if self._map is not None:
                self._map.close()
        os.close(self.descriptor)


def memory_of(descriptor: int, nbytes: int) -> Memory:
    """Map what another process wrote, of which nobody takes or changes anything from now on.

    Raises:
        OSError, ValueError: it cannot be sealed or mapped, or is smaller than it should be.
    """
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    held = os.fstat(descriptor).st_size
    if held < nbytes:
        message = f"{held} bytes instead of {nbytes}"
        raise ValueError(message)
    mapped = mmap.mmap(descriptor, max(nbytes, 1))
    with contextlib.suppress(OSError):  # an older kernel
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    return mapped
