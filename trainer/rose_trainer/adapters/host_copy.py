"""A copy of the model in host memory, filled from iterators whose tensors are gone at the next."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Protocol

import torch

from rose_core.identity import WeightVersion

Named = tuple[str, torch.Tensor]


class Publishes(Protocol):
    """The part of ``Publisher`` that adapters need."""

    def publish(
        self, step: int, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> WeightVersion:
        """Take a snapshot."""
        ...

    def wait(self, version: WeightVersion, timeout_seconds: float | None = None) -> object:
        """Wait until it is durable."""
        ...

    def close(self) -> None:
        """End."""
        ...


class HostCopy:
    """One copy of the model beside the publisher's own; memory is taken once.

    Attributes:
        tensors: what was taken last, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor out."""
        held = self.tensors.get(name)
        if held is None:
            self.tensors[name] = tensor.detach().to("cpu", copy=True)
        else:
            held.copy_(tensor.detach())


async def each(pairs: Iterable[Named] | AsyncIterable[Named]) -> AsyncIterator[Named]:
    """The pairs of an iterator of either kind."""
    if isinstance(pairs, AsyncIterable):
        async for pair in pairs:
            yield pair
    else:
        for pair in pairs:
            yield pair
