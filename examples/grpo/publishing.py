"""Weights out: what the loop needs of a publisher, over ``rose_trainer.Publisher``.

The loop publishes the next version while the last is still on its way; what became of a version
(density, bytes, time) is known a moment later and collected by ``finished``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch

from rose_core.identity import WeightVersion
from rose_trainer.errors import NotPublished
from rose_trainer.publisher import Publisher


@dataclass(frozen=True)
class Published:
    """What became of one version.

    Attributes:
        changed_share: elements whose bits differ from the version before; 1.0 for the first.
        bytes: size of the blocks sent.
        durable_seconds: from the snapshot until the store held it.
    """

    step: int
    version: WeightVersion
    changed_share: float
    bytes: int
    durable_seconds: float


class Weights(Protocol):
    """Where a step's weights go."""

    def publish(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightVersion:
        """Take a snapshot, send it in the background."""

    def finished(self, *, wait: bool = False) -> list[Published]:
        """Versions that became durable since the last call; ``wait`` for all first."""


class RosePublisher:
    """``Weights`` over the store of the lease's run.

    Args:
        address: ``host:port`` of the weight store.
        run: ``spec.weights.run`` of the lease.
        token: the store's bearer token.

    Raises:
        PublishFailed: the store cannot be reached or refuses.
    """

    def __init__(self, address: str, *, run: str, token: str) -> None:
        self._publisher = Publisher(address, run, token=token, patience_seconds=60.0)
        self._waiting: list[WeightVersion] = []

    def publish(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightVersion:
        """Take a snapshot, send it in the background."""
        version = self._publisher.publish(step, tensors)
        self._waiting.append(version)
        return version

    def finished(self, *, wait: bool = False) -> list[Published]:
        """Versions that became durable since the last call; ``wait`` for all first."""
        result = []
        while self._waiting:
            try:
                done = self._publisher.wait(self._waiting[0], 60.0 if wait else 0.0)
            except NotPublished:
                break
            del self._waiting[0]
            share = done.changes / max(done.elements, 1)
            result.append(Published(done.step, done.version, share, done.bytes, done.seconds))
        return result

    def __enter__(self) -> Self:
        """Use as a context manager: at the end everything taken is published."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._publisher.__exit__(kind, error, trace)
