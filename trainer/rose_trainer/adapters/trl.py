"""TRL's asynchronous GRPO publishes through ROSE instead of a group of GPUs.

    trainer.weight_transfer = WeightTransfer(Publisher("store:7446", "grpo", token=token))

TRL calls, at the beginning of training and every ``weight_sync_steps``, in this order:
``init_weight_transfer`` (once), ``pause``, ``send_weights(iterator)``, ``resume``; at the end
``destroy``. The iterator gathers one parameter after the other and must be drained whole, as every
other rank takes part; each tensor is gone when the next is asked for, so it is copied out first.

Nothing is paused: engines change weights between two tokens, and every token says which version
sampled it. ``OldestFirst`` has the trainer take what is oldest instead of what finished first.
``Reporting`` notes what it takes; ``trl_hooks`` puts it there, and names the turns. ``trl`` itself
is not imported here.
"""

from __future__ import annotations

import math
import queue
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from rose_core.identity import WeightVersion
from rose_core.rollouts.training.consumption import ConsumptionBound, next_batch
from rose_trainer.adapters.host_copy import HostCopy, Publishes

__all__ = ["OldestFirst", "WeightTransfer"]


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


class Sample(Protocol):
    """TRL's scored sample; ``model_version`` is the trainer's own count."""

    model_version: int


class Samples(Protocol):
    """TRL's queue of scored samples."""

    def get(self, block: bool = True, timeout: float | None = None) -> Sample:
        """The next one; raises ``queue.Empty``."""
        ...

    def qsize(self) -> int:
        """How many there are."""
        ...


class OldestFirst:
    """Stands before TRL's queue: of what is finished, the oldest goes first.

        trainer.rollout_queue = OldestFirst(trainer.rollout_queue, lambda: trainer.model_version,
                                            args.max_staleness)

    TRL does not say what its rollout process has begun, so a step never waits for a group that only
    it could still take (``consumption`` does where that is known): this delays the drop of long
    groups, and does not prevent it. What is too old goes to TRL, which drops and counts it.

    Args:
        samples: TRL's queue.
        version: the trainer's own count of syncs, now.
        staleness: TRL's ``max_staleness``.
    """

    def __init__(self, samples: Samples, version: Callable[[], int], staleness: int) -> None:
        self._samples, self._version = samples, version
        self._bound = ConsumptionBound(batch=1, staleness=staleness)
        self._held: list[Sample] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Sample:
        """The oldest sample; waits for one as TRL's queue does.

        Raises:
            Empty: none came in time.
        """
        self._take_what_is_there()
        if not self._held:
            self._held.append(self._samples.get(block, timeout))
            self._take_what_is_there()
        return self._held.pop(self._oldest())

    def qsize(self) -> int:
        """Samples that wait, here or in TRL's queue."""
        return len(self._held) + self._samples.qsize()

    def _take_what_is_there(self) -> None:
        try:
            while True:
                self._held.append(self._samples.get(False))
        except queue.Empty:
            return

    def _oldest(self) -> int:
        version = self._version()
        ready = [one.model_version for one in self._held]
        late = [n for n, begun in enumerate(ready) if version - begun > self._bound.staleness]
        # Nothing is known to be under way, so there is always a batch.
        return late[0] if late else next_batch(ready, (), version, self._bound)[0]


class SessionSample(Sample, Protocol):
    """A scored sample that knows its session (``trl_hooks.NamedSample``)."""

    session: str
    input_ids: Sequence[int]
    metrics: Mapping[str, float]


_REMEMBERED = 65536  # sessions whose fate is remembered, so that none is reported twice


class Reporting:
    """Stands before TRL's queue: notes which trajectories the trainer takes, and which it drops.

    A trajectory may come as several samples (rows), one after the other; it was trained on if one
    of them was. What TRL takes ahead for its next step counts as taken.

    Args:
        samples: TRL's queue, or an ``OldestFirst`` before it.
        trains_on: whether TRL will train on a sample that it has just taken.
        report: takes rewards by session, of those trained on and of those dropped.
    """

    def __init__(
        self,
        samples: Samples,
        trains_on: Callable[[SessionSample], bool],
        report: Callable[[dict[str, float | None], dict[str, float | None]], object],
    ) -> None:
        self._samples, self._trains_on, self._report = samples, trains_on, report
        self._fates: dict[str, tuple[bool, float | None]] = {}
        self._reported: OrderedDict[str, None] = OrderedDict()
        self._last = ""

    def get(self, block: bool = True, timeout: float | None = None) -> Sample:
        """The next sample; waits for one as TRL's queue does.

        Raises:
            Empty: none came in time.
        """
        sample = self._samples.get(block, timeout)
        self._note(sample)  # type: ignore[arg-type]  # the loop of ``trl_hooks`` made it
        return sample

    def qsize(self) -> int:
        """Samples that wait."""
        return self._samples.qsize()

    def report(self, *, ended: bool = False) -> None:
        """Report what was taken since; not the last trajectory, of which more rows may come.

        Args:
            ended: no more rows come.
        """
        finished = {name: one for name, one in self._fates.items() if ended or name != self._last}
        for name in finished:
            del self._fates[name]
            self._reported[name] = None
        while len(self._reported) > _REMEMBERED:
            self._reported.popitem(last=False)
        if finished:
            self._report(
                {name: reward for name, (trained, reward) in finished.items() if trained},
                {name: reward for name, (trained, reward) in finished.items() if not trained},
            )

    def _note(self, sample: SessionSample) -> None:
        name, reward = sample.session, sample.metrics.get("reward", math.nan)
        self._last = name
        if name in self._reported:
            return
        before, _ = self._fates.get(name, (False, None))
        known = None if math.isnan(reward) else reward
        self._fates[name] = before or self._trains_on(sample), known
