"""TRL's asynchronous GRPO publishes through ROSE instead of a group of GPUs.

    trainer.weight_transfer = WeightTransfer(Publisher("store:7446", "grpo", token=token))

TRL calls, at the beginning of training and every ``weight_sync_steps``, in this order:
``init_weight_transfer`` (once), ``pause``, ``send_weights(iterator)``, ``resume``; at the end
``destroy``. The iterator gathers one parameter after the other and must be drained whole, as every
other rank takes part; each tensor is gone when the next is asked for, so it is copied out first.

Nothing is paused: engines change weights between two tokens, and every token says which version
sampled it. ``trl`` itself is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rose_core.identity import WeightVersion
from rose_trainer.adapters.host import HostCopy, Publishes


class WeightTransfer:
    """What ``AsyncGRPOTrainer`` expects as ``weight_transfer``.

    Host memory: one copy of the model beside the publisher's own.

    Args:
        publisher: of the run.
        durable_seconds: wait for so long that each version is durable; ``None`` = do not wait, the
            trainer goes on after one copy of the model.
    """

    def __init__(self, publisher: Publishes, *, durable_seconds: float | None = None) -> None:
        self._publisher = publisher
        self._durable_seconds = durable_seconds
        self._host = HostCopy()
        self._step = 0
        self.version: WeightVersion | None = None

    def init_weight_transfer(self) -> None:
        """There is no group to join: engines come to the store."""

    def pause(self) -> None:
        """Turns go on."""

    def resume(self) -> None:
        """They never stopped."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Drain the iterator and publish.

        Args:
            iterator: names and tensors, each valid until the next is asked for.

        Raises:
            BadState: tensors that cannot be published.
            PublishFailed: an earlier version could not be published.
        """
        for name, tensor in iterator:
            self._host.take(name, tensor)
        self.version = self._publisher.publish(self._step, self._host.tensors)
        self._step += 1
        if self._durable_seconds is not None:
            self._publisher.wait(self.version, self._durable_seconds)

    def destroy(self) -> None:
        """Publish what has been taken, and end."""
        self._publisher.close()
