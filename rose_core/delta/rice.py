"""Codec v2: positions and steps coded knowing the base, about a quarter smaller than v1.

The smaller a float, the finer its steps and the likelier a change: the exponent of the *old* value
tells how likely. Elements are sorted into sixteen classes by how far their exponent lies below the
tile's largest; within a class gaps between changes are Rice-coded with the class's own parameter,
and each is followed by the step: a sign bit and the magnitude in unary.

The receiver must hold the base to read such a block, so it is for a last hop whose sender holds the
base too; it cannot be merged without it. ``STEPS`` (v1) is what is stored and merged.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from rose_core.delta import rice_loops
from rose_core.delta.bits import Bits, Indices, NumberFormat
from rose_core.delta.errors import BlockError
from rose_core.delta.kernels import Backend, compiled, kernels
from rose_core.delta.rice_loops import CLASSES

# reference exponent; then per class the Rice parameter (low 5 bits) and the number of changes
_TABLE = struct.Struct(f"<H{CLASSES}I")
TABLE_BYTES = _TABLE.size
WIDEST = 4
"""Bytes per element; wider formats have no use for classes."""


def encode(
    old: Bits, indices: Indices, steps: Bits, kind: NumberFormat, backend: Backend = "auto"
) -> tuple[bytes, bytes]:
    """The class table and the bit stream of a tile's changes.

    Raises:
        BlockError: the format is too wide for this codec.
    """
    if kind.width > WIDEST:
        message = f"{kind.name} is too wide for exponent classes"
        raise BlockError(message)
    shift, mask = _exponent(kind)
    reference = int(((old >> old.dtype.type(shift)) & old.dtype.type(mask)).max(initial=0))
    classes, gaps = _run(backend).rank(old, indices, shift, mask, reference)
    order = np.argsort(classes, kind="stable")
    counts = np.bincount(classes, minlength=CLASSES)
    gaps, ordered_steps = gaps[order], steps[order]
    ends = np.cumsum(counts)
    parameters = [
        _parameter(gaps[end - count : end]) for end, count in zip(ends, counts, strict=True)
    ]
    words = [
        int(parameter) | int(count) << 5
        for parameter, count in zip(parameters, counts, strict=True)
    ]
    bits = _run(backend).write(gaps, ordered_steps, counts, np.array(parameters), kind.width * 8)
    return _TABLE.pack(reference, *words), np.packbits(bits).tobytes()


def decode(  # noqa: PLR0917
    old: Bits,
    table: bytes,
    stream: bytes,
    changes: int,
    kind: NumberFormat,
    backend: Backend = "auto",
) -> tuple[Indices, Bits]:
    """Positions and steps.

    Raises:
        BlockError: the bytes do not describe ``changes`` changes of this base.
    """
    if len(table) != TABLE_BYTES or kind.width > WIDEST:
        message = f"a class table of {len(table)} bytes for {kind.name}"
        raise BlockError(message)
    reference, *words = _TABLE.unpack(table)
    counts = np.array([word >> 5 for word in words], np.int64)
    parameters = np.array([word & 31 for word in words], np.int64)
    if int(counts.sum()) != changes or len(stream) * 8 < 3 * changes:
        message = f"classes of {int(counts.sum())} changes where {changes} are promised"
        raise BlockError(message)
    gaps, steps = np.empty(changes, np.int64), np.empty(changes, kind.unsigned)
    data = np.frombuffer(stream, np.uint8)
    good = _run(backend).read(data, counts, parameters, kind.width * 8, gaps, steps)
    shift, mask = _exponent(kind)
    found = _run(backend).place(old, shift, mask, reference, counts, gaps) if good else None
    if found is None:
        message = f"a bit stream that does not describe {changes} changes of this base"
        raise BlockError(message)
    indices, source = found
    return indices, steps[source]


def _exponent(kind: NumberFormat) -> tuple[int, int]:
    """Shift and mask that give a value's exponent; integers are all of one class."""
    if not kind.sign_magnitude:
        return 0, 0
    return kind.mantissa, (1 << (kind.width * 8 - 1 - kind.mantissa)) - 1


def _parameter(gaps: Indices) -> int:
    """The Rice parameter that codes these gaps in the fewest bits."""
    if not len(gaps):
        return 0
    guess = max(int(gaps.mean() * 0.69 + 1).bit_length() - 1, 0)
    costs = {
        parameter: int((gaps >> parameter).sum()) + len(gaps) * (parameter + 1)
        for parameter in range(max(guess - 1, 0), min(guess + 2, 31))
    }
    return min(costs, key=lambda parameter: costs[parameter])


class _Loops:
    """The loops, compiled or as they stand."""

    def __init__(self, compile_: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._rank = compile_(rice_loops.rank)
        self._place = compile_(rice_loops.place)
        self._write = compile_(rice_loops.write)
        self.read = compile_(rice_loops.read)

    def rank(
        self, old: Bits, indices: Indices, shift: int, mask: int, reference: int
    ) -> tuple[Bits, Indices]:
        """Class and gap of every change."""
        classes, gaps = np.empty(len(indices), np.uint8), np.empty(len(indices), np.int64)
        self._rank(old, indices, shift, mask, reference, classes, gaps)
        return classes, gaps

    def place(  # noqa: PLR0917
        self, old: Bits, shift: int, mask: int, reference: int, counts: Indices, gaps: Indices
    ) -> tuple[Indices, Indices] | None:
        """Positions of the changes and where each one's gap stood."""
        indices, source = np.empty(len(gaps), np.int64), np.empty(len(gaps), np.int64)
        good = self._place(old, shift, mask, reference, counts, gaps, indices, source)
        return (indices, source) if good else None

    def write(
        self, gaps: Indices, steps: Bits, counts: Indices, parameters: Indices, width: int
    ) -> Bits:
        """The bit stream, one byte per bit."""
        quotients = np.minimum(gaps >> np.repeat(parameters, counts), 24)
        room = int(quotients.sum()) + len(gaps) * (32 + 1 + 1 + 16 + width)
        out = np.empty(room, np.uint8)
        return out[: self._write(gaps, steps, counts, parameters, width, out)]


class _Numpy(_Loops):
    """Where every element is touched, numpy instead of an interpreted loop."""

    def rank(
        self, old: Bits, indices: Indices, shift: int, mask: int, reference: int
    ) -> tuple[Bits, Indices]:
        """Class and gap of every change."""
        whole = _classes(old, shift, mask, reference)
        classes, gaps = whole[indices], np.empty(len(indices), np.int64)
        for kind in np.unique(classes):
            mine = classes == kind
            among = np.searchsorted(np.flatnonzero(whole == kind), indices[mine])
            gaps[mine] = np.diff(among, prepend=-1) - 1
        return classes, gaps

    def place(  # noqa: PLR0917
        self, old: Bits, shift: int, mask: int, reference: int, counts: Indices, gaps: Indices
    ) -> tuple[Indices, Indices] | None:
        """Positions of the changes and where each one's gap stood."""
        whole = _classes(old, shift, mask, reference)
        indices = np.empty(len(gaps), np.int64)
        end = 0
        for kind, count in enumerate(counts):
            start, end = end, end + int(count)
            among = np.cumsum(gaps[start:end] + 1) - 1
            members = np.flatnonzero(whole == kind)
            if count and int(among[-1]) >= len(members):
                return None
            indices[start:end] = members[among]
        source = np.argsort(indices, kind="stable")
        return indices[source], source


def _classes(old: Bits, shift: int, mask: int, reference: int) -> Bits:
    exponents = ((old >> old.dtype.type(shift)) & old.dtype.type(mask)).astype(np.int64)
    classes: Bits = np.clip(reference - exponents, 0, CLASSES - 1).astype(np.uint8)
    return classes


@functools.cache
def _run(backend: Backend) -> _Loops:
    if kernels(backend).name == "numba":
        return _Loops(compiled)
    return _Numpy(lambda loop: loop)
