"""Tensors of a running engine in canonical coordinates: Hugging Face name and flat index.

``LiveTensor`` is what staging and committing need of a tensor, wherever its memory is and however
much of it this process holds. Here are those that are held whole in host memory; a rank's part is
``rose_engines.tensors.slices``, memory of a device ``rose_engines.tensors.parameters``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rose_core.delta.bits import Bits, Indices
from rose_core.delta.digest import Digest, digest_run
from rose_core.delta.kernels import kernels
from rose_core.delta.safetensors import StoredTensor
from rose_core.delta.tiles import TileBox

Where = slice | Indices
# Elements whose places are looked up at a time: 128 MiB of positions.
AT_ONCE = 1 << 24


class LiveTensor(Protocol):
    """One canonical tensor inside the engine, flat, as unsigned integers of its bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def take(self, where: Where) -> Bits:
        """A copy of these elements, in host memory."""
        ...

    def put(self, where: Where, bits: Bits) -> None:
        """Overwrite these elements."""
        ...

    def holds(self, where: Where, bits: Bits) -> bool:
        """Whether these elements are these bits, read from the live weights."""
        ...

    def all_bits(self) -> Bits:
        """Every element that is held here, in host memory: a view where possible, else a copy."""
        ...

    def own(self, where: Where) -> tuple[Where, Indices | None]:
        """Those of these canonical positions that are held here, as ``take`` and ``put`` name them.

        Returns:
            The places, and which of the positions they belong to; None = all of them.
        """
        ...

    def touches(self, tile: TileBox, columns: int) -> bool:
        """Whether a tile of the tensor, a matrix of so many columns, may have a part here."""
        ...

    def digest(self) -> Digest:
        """Digest of the elements that are held here, read from the live weights."""
        ...


class WholeTensor(ABC):
    """A tensor of which this process holds every element, in canonical order."""

    name: str

    def own(self, where: Where) -> tuple[Where, Indices | None]:
        """All of them, where they are asked for."""
        return where, None

    def touches(self, tile: TileBox, columns: int) -> bool:  # noqa: ARG002  # it holds every tile
        """Always."""
        return True

    def digest(self) -> Digest:
        """Digest of the whole tensor."""
        return digest_run(self.name, 0, np.ascontiguousarray(self.all_bits()))

    @abstractmethod
    def all_bits(self) -> Bits:
        """Every element."""


def do_nothing() -> None:
    """Nothing is made of this tensor."""


def always_current() -> bool:
    """Nothing is made of this tensor that could be out of date."""
    return True


STALE = Digest(1, 1)
"""Added to the digest of a tensor of which the engine keeps something out of date: no version has
such a digest, so it is neither confirmed nor attested."""


@dataclass
class HostTensor(WholeTensor):
    """A tensor in host memory.

    Attributes:
        flat: (a view of) the storage the engine computes with.
        written: called after each ``put``; renews what the engine keeps that is made of it.
        current: whether what it keeps is what would be made now.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    flat: Bits
    written: Callable[[], object] = do_nothing
    current: Callable[[], bool] = always_current

    def take(self, where: Where) -> Bits:
        """A copy of these elements."""
        if isinstance(where, slice):
            return self.flat[where].copy()
        # Positions were checked with the block; checking each again would double the time.
        return self.flat.take(where, mode="clip")

    def put(self, where: Where, bits: Bits) -> None:
        """Overwrite these elements."""
        if isinstance(where, slice):
            self.flat[where] = bits
        else:
            kernels().put(self.flat, where, bits)
        self.written()

    def holds(self, where: Where, bits: Bits) -> bool:
        """Whether these elements are these bits."""
        if isinstance(where, slice):
            return np.array_equal(self.flat[where], bits)
        return kernels().holds(self.flat, where, bits)

    def all_bits(self) -> Bits:
        """The storage itself."""
        return self.flat

    def digest(self) -> Digest:
        """Digest of the whole tensor, and whether what is made of it follows it."""
        return self.marked(super().digest())

    def marked(self, found: Digest) -> Digest:
        """A digest of the storage, which is none of a version's while what is made of it is old."""
        return found if self.current() else found.plus(STALE)

    def span(self, first: int, end: int) -> Bits:
        """A view of a run."""
        return self.flat[first:end]


Live = Mapping[str, LiveTensor]


def host_tensors(state: Mapping[str, StoredTensor]) -> dict[str, LiveTensor]:
    """Tensors in host memory that hold a checkpoint's."""
    return {name: HostTensor(name, *stored) for name, stored in state.items()}
