"""The weights of an engine that computes with a LoRA adapter over a base which nobody trains.

What is live here is the adapter: a version is staged, committed at a boundary and attested as that
of any run, and is a few megabytes. The base belongs to what is attested: its digest, measured on
the live weights, is one of the tensors, so a version for another base is refused when it is staged.
Next step: ``rose_engines.sglang.adapters`` finds the adapter in a running SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from rose_core.adapters import BASE, SCALE
from rose_core.delta.bits import Bits
from rose_core.delta.digest import Digest, digest_run
from rose_engines.errors import CommitRefused
from rose_engines.session import WeightSession
from rose_engines.sglang.calls import Staged
from rose_engines.tensors import HostTensor, Where, WholeTensor


class BaseDigest(WholeTensor):
    """The base model as one small tensor: its digest.

    Args:
        measure: reads the digest from the live weights of the base; takes a while.
    """

    def __init__(self, measure: Callable[[], Digest]) -> None:
        self.name, self.dtype = BASE, "I64"
        self.shape: tuple[int, ...] = (2,)
        self._measure = measure
        self._bits = _words(measure())

    def take(self, where: Where) -> Bits:
        """A copy of words, as last measured."""
        return self._bits[where].copy()

    def put(self, where: Where, bits: Bits) -> None:
        """Nothing: ``AdapterSession`` stages no other words than these."""

    def holds(self, where: Where, bits: Bits) -> bool:
        """Whether the words are these, as last measured."""
        return np.array_equal(self._bits[where], bits)

    def all_bits(self) -> Bits:
        """Both words, as last measured."""
        return self._bits

    def digest(self) -> Digest:
        """Digest of the words, measured anew: who attests an adapter attests its base."""
        self._bits = _words(self._measure())
        return digest_run(self.name, 0, self._bits)


def _words(digest: Digest) -> Bits:
    return np.array([digest.low, digest.high], "<u8")


def scale_tensor(use: Callable[[float], object]) -> HostTensor:
    """The factor, 0 at first; ``use`` is called with it whenever it was written."""
    bits = np.zeros(1, "<u8")
    return HostTensor(SCALE, "F64", (1,), bits, lambda: use(float(bits.view("<f8")[0])))


class AdapterSession(WeightSession):
    """Weights of one adapter on one engine; ``live`` holds it, its factor and its base's digest."""

    def _stage(self, bundle: Path) -> Staged:
        staged = super()._stage(bundle)
        update = self._staged
        for change in update.changes if update is not None else ():
            if change.tensor.name == BASE and not np.array_equal(change.old, change.new):
                self._forget()
                theirs, ours = (Digest(*map(int, bits)) for bits in (change.new, change.old))
                raise CommitRefused(
                    "Layout",
                    f"{staged.version} is an adapter for the base with digest {theirs}; this "
                    f"engine's has {ours}: publish it with the folder that the engines load",
                )
        return staged
