"""Codec v2: positions and steps coded knowing the base, about a quarter smaller than v1.

The smaller a float, the finer its steps and the likelier a change: the exponent of the *old* value
tells how likely. Elements are sorted into sixteen classes by how far their exponent lies below the
tile's largest; within a class gaps between changes are coded by Golomb's code with a power of two
as its parameter (Golomb, 1966; Rice and Plaunt, 1971), the class's own, and each is followed by the
step: a sign bit and the magnitude in unary.

The receiver must hold the base to read such a block, so it is for a last hop whose sender holds the
base too; it cannot be merged without it. ``STEPS`` (v1) is what is stored and merged.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose_core.delta import rice_loops, rice_vectors
from rose_core.delta.bits import Bits, Indices, NumberFormat
from rose_core.delta.errors import BlockError
from rose_core.delta.kernels import Backend, ClassLoops, compiled, kernels
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
    return encode_ranked(rank(old, indices, kind, backend), steps, kind, backend)


@dataclass(frozen=True)
class Ranked:
    """The changes of a tile as seen from its base: all that coding them needs of it.

    Attributes:
        reference: largest exponent of the tile.
        classes: of every change.
        gaps: unchanged elements of its class since the last change in the class.
    """

    reference: int
    classes: Bits
    gaps: Indices


def rank(old: Bits, indices: Indices, kind: NumberFormat, backend: Backend = "auto") -> Ranked:
    """Class and gap of every change; ``old`` is the whole tile."""
    shift, mask = exponent(kind)
    run = class_loops(backend)
    reference = run.largest(old, mask << shift) >> shift
    return Ranked(reference, *run.rank(old, indices, shift, mask, reference))


def encode_ranked(
    ranked: Ranked, steps: Bits, kind: NumberFormat, backend: Backend = "auto"
) -> tuple[bytes, bytes]:
    """The class table and the bit stream of changes whose classes are known."""
    run = class_loops(backend)
    counts, gaps, steps = run.arrange(ranked.classes, ranked.gaps, steps)
    parameters = run.choose(gaps, counts)
    words = [
        parameter | count << 5
        for parameter, count in zip(parameters.tolist(), counts.tolist(), strict=True)
    ]
    bits = run.write(gaps, steps, counts, parameters, kind.width * 8)
    return _TABLE.pack(ranked.reference, *words), bits


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
    good = class_loops(backend).read(stream, counts, parameters, kind.width * 8, gaps, steps)
    shift, mask = exponent(kind)
    found = class_loops(backend).place(old, shift, mask, reference, counts, gaps) if good else None
    if found is None:
        message = f"a bit stream that does not describe {changes} changes of this base"
        raise BlockError(message)
    indices, source = found
    return indices, steps[source]


def exponent(kind: NumberFormat) -> tuple[int, int]:
    """Shift and mask that give a value's exponent; integers are all of one class."""
    if not kind.sign_magnitude:
        return 0, 0
    return kind.mantissa, (1 << (kind.width * 8 - 1 - kind.mantissa)) - 1


@functools.cache
def class_loops(backend: Backend = "auto") -> ClassLoops:
    """The loops of a backend.

    Raises:
        ModuleNotFoundError: ``numba`` was demanded and is not installed.
    """
    chosen = kernels(backend)
    if chosen.classes is not None:
        return chosen.classes
    if chosen.name == "numba":
        return _compiled()
    return ClassLoops(
        rice_vectors.largest,
        rice_vectors.rank,
        rice_vectors.arrange,
        rice_vectors.choose,
        rice_vectors.write,
        rice_vectors.read,
        rice_vectors.place,
    )


def _compiled() -> ClassLoops:
    largest_loop, rank_loop, arrange_loop, choose_loop, write_loop, read_loop, place_loop = (
        compiled(loop)
        for loop in (
            rice_loops.largest,
            rice_loops.rank,
            rice_loops.arrange,
            rice_loops.choose,
            rice_loops.write,
            rice_loops.read,
            rice_loops.place,
        )
    )

    def largest(old: Bits, mask: int) -> int:
        return int(largest_loop(old, mask))

    def rank(
        old: Bits, indices: Indices, shift: int, mask: int, reference: int
    ) -> tuple[Bits, Indices]:
        classes, gaps = np.empty(len(indices), np.uint8), np.empty(len(indices), np.int64)
        edges = _edges(shift, mask, reference, old.dtype)
        rank_loop(old, indices, shift, mask, reference, *edges, _UP_TO, classes, gaps)
        return classes, gaps

    def arrange(classes: Bits, gaps: Indices, steps: Bits) -> tuple[Indices, Indices, Bits]:
        counts = np.empty(CLASSES, np.int64)
        gaps_out, steps_out = np.empty_like(gaps), np.empty_like(steps)
        arrange_loop(classes, gaps, steps, counts, gaps_out, steps_out)
        return counts, gaps_out, steps_out

    def choose(gaps: Indices, counts: Indices) -> Indices:
        parameters = np.empty(CLASSES, np.int64)
        choose_loop(gaps, counts, parameters)
        return parameters

    def write(
        gaps: Indices, steps: Bits, counts: Indices, parameters: Indices, width: int
    ) -> bytes:
        words = np.empty(2 * len(gaps) + 1, np.uint64)
        bits = write_loop(gaps, steps, counts, parameters, width, words)
        return words[: -(-bits // 64)].astype(">u8").tobytes()[: -(-bits // 8)]

    def read(  # noqa: PLR0917
        stream: bytes, counts: Indices, parameters: Indices, width: int, gaps: Indices, steps: Bits
    ) -> bool:
        padded = stream + bytes(-len(stream) % 8 + 24)
        words = np.frombuffer(padded, ">u8").astype(np.uint64)
        bits = len(stream) * 8
        return bool(read_loop(words, bits, _LEADING, counts, parameters, width, gaps, steps))

    def place(  # noqa: PLR0917
        old: Bits, shift: int, mask: int, reference: int, counts: Indices, gaps: Indices
    ) -> tuple[Indices, Indices] | None:
        indices, source = np.empty(len(gaps), np.int64), np.empty(len(gaps), np.int64)
        kinds, ones = _lanes(mask, reference)
        good = place_loop(old, shift, mask, kinds, ones, counts, gaps, indices, source)
        return (indices, source) if good else None

    return ClassLoops(largest, rank, arrange, choose, write, read, place)


_UP_TO = np.repeat(np.array([1, 0], np.uint16), rice_loops.BLOCK)
_LEADING = np.array([8 - (255 - byte).bit_length() for byte in range(256)], np.uint8)


def _edges(shift: int, mask: int, reference: int, dtype: np.dtype[Any]) -> tuple[Bits, Bits]:
    """Per class the lowest magnitude, and how far above it the highest is."""
    exponents = np.clip(reference - np.arange(CLASSES), 0, mask)
    lowest = exponents << shift
    lowest[-1] = 0
    return lowest.astype(dtype), (((exponents + 1) << shift) - 1 - lowest).astype(dtype)


def _lanes(mask: int, reference: int) -> tuple[Bits, Bits]:
    """Per exponent its class, and a one in the byte of two words that counts the class."""
    exponents = np.arange(mask + 1)
    kinds = np.clip(reference - exponents, 0, CLASSES - 1).astype(np.uint8)
    ones = np.zeros((mask + 1, 2), np.uint64)
    ones[exponents, kinds >> 3] = np.uint64(1) << (np.uint64(8) * (kinds & 7))
    return kinds, ones.reshape(-1)
