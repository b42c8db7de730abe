"""A linear, position-keyed digest of weights: the number trainer, store and engine agree on.

The digest of a set of elements is the sum, in two 64-bit lanes, of ``key(tensor, index) * bits``.
Being a sum, the digest of a tensor is the sum over its tiles, of a model the sum over its tensors,
whatever ranks hold the parts; and a change updates it by the changed elements alone:
``D(new) = D(old) + sum(key * (new - old))``. Keys are odd, so any single wrong element shows; they
depend on the position (splitmix64 of tensor and index, ``loops``), so swapped elements and slices
show. It finds accidents, not attackers: blocks carry a cryptographic hash besides.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rose_core.delta.bits import Bits, Indices
from rose_core.delta.kernels import Backend, kernels
from rose_core.delta.tiles import Tiling

_EVERY = (1 << 64) - 1


class Digest(NamedTuple):
    """Two lanes, each modulo 2**64; sums are lane by lane."""

    low: int
    high: int

    def plus(self, other: Digest) -> Digest:
        """The digest of two disjoint sets of elements together."""
        return Digest((self.low + other.low) & _EVERY, (self.high + other.high) & _EVERY)

    def __str__(self) -> str:
        """32 hexadecimal digits; what labels, statuses and attestations show."""
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Read 32 hexadecimal digits.

        Raises:
            ValueError: the text is something else.
        """
        if len(text) != 32:
            message = f"{text!r} is no digest; expected 32 hexadecimal digits"
            raise ValueError(message)
        return cls(int(text[16:], 16), int(text[:16], 16))


NOTHING = Digest(0, 0)


def total(parts: Iterable[Digest]) -> Digest:
    """The digest of all parts together."""
    sum_ = NOTHING
    for part in parts:
        sum_ = sum_.plus(part)
    return sum_


@functools.cache
def tensor_key(name: str) -> int:
    """The key of a tensor: its Hugging Face name, hashed to 64 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def digest_run(name: str, first: int, bits: Bits, backend: Backend = "auto") -> Digest:
    """Digest of the elements of tensor ``name`` from flat index ``first`` on.

    ``bits`` are unsigned integers, one-dimensional and contiguous.
    """
    return Digest(*kernels(backend).digest_run(bits, first, tensor_key(name)))


def digest_at(name: str, indices: Indices, bits: Bits, backend: Backend = "auto") -> Digest:
    """Digest of single elements; ``indices`` are flat, in any order, without repeats."""
    return Digest(*kernels(backend).digest_at(indices, bits, tensor_key(name)))


def digest_change(
    name: str, indices: Indices, old: Bits, new: Bits, backend: Backend = "auto"
) -> Digest:
    """What a change adds to the digest of whatever contains these elements."""
    # The digest is linear, so the differences, modulo 2**64, are summed in one pass.
    moved = new.astype(np.uint64) - old.astype(np.uint64)
    return digest_at(name, indices, moved, backend)


def digest_tile(name: str, flat: Bits, cut: Tiling, tile: int, backend: Backend = "auto") -> Digest:
    """Digest of one tile of a flat tensor."""
    box = cut.box(tile)
    if box.column1 - box.column0 == cut.columns:
        first = box.row0 * cut.columns
        return digest_run(name, first, flat[first : first + box.elements], backend)
    return total(
        digest_run(
            name,
            row * cut.columns + box.column0,
            flat[row * cut.columns + box.column0 : row * cut.columns + box.column1],
            backend,
        )
        for row in range(box.row0, box.row1)
    )


def to_bytes(digests: Iterable[Digest]) -> bytes:
    """Digests as the manifest stores them: low and high lane, little-endian, 16 bytes each."""
    return np.array([tuple(digest) for digest in digests], "<u8").tobytes()


def total_of(data: bytes) -> Digest:
    """The sum of digests as ``to_bytes`` wrote them, without making each."""
    lanes = np.frombuffer(data, "<u8").reshape(-1, 2)
    low, high = np.add.reduce(lanes, axis=0, dtype=np.uint64)
    return Digest(int(low), int(high))


def from_bytes(data: bytes) -> list[Digest]:
    """The inverse of ``to_bytes``."""
    pairs = np.frombuffer(data, "<u8").reshape(-1, 2)
    return [Digest(int(low), int(high)) for low, high in pairs]
