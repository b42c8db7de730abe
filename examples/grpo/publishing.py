"""Weights out: what the loop needs of a publisher, over ``rose_trainer.Publisher``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from rose_core.identity import WeightVersion


@dataclass(frozen=True)
class Published:
    """One publish.

    Attributes:
        changed_share: elements whose bits differ from the version before; 1.0 for the first.
        bytes: size of the blocks sent.
    """

    version: WeightVersion
    changed_share: float
    bytes: int


class Weights(Protocol):
    """Where a step's weights go."""

    def publish(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Send one version out; returns when it is durable or queued."""
