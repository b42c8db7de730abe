"""One replica's GPUs, shared by a serving engine and at most one rollout engine.

Interference is *modelled*, not measured. When both have work:

| sharing | serving | rollouts | rollouts beside idle serving |
|---|---|---|---|
| time slicing | ``serving_slowdown`` times slower | ``rollout_slowdown`` | full speed |
| MPS (other figures) | the same | the same | ``rollout_alone``: the share is fixed |
| yielding (clairvoyant) | undisturbed | stand still | full speed |

Two processes under time slicing kept 44 to 73 % of a dedicated GPU's throughput each, depending on
batch (NVIDIA Dynamo, A100; 2.25 to 1.37 times slower); the default takes 2.0 for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_simulate.model.clock import Event, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine


@dataclass(frozen=True)
class CorunningCost:
    """What co-running costs; factors of time, at least 1."""

    serving_slowdown: float = 2.0
    rollout_slowdown: float = 2.0
    rollout_alone: float = 1.0
    yielding: bool = False


class SharedGpus:
    """The GPUs of one replica; ``may_compute`` is whether the rollout engine is let.

    Attributes:
        computing_ns: time during which rollouts were let compute.
        shared_ns: time during which both computed.
        opened: how often rollouts were let compute.
    """

    def __init__(self, clock: VirtualClock, sharing: CorunningCost) -> None:
        self._clock, self._sharing = clock, sharing
        self.serving: BatchEngine | None = None
        self.rollout: BatchEngine | None = None
        self.may_compute = False
        self.computing_ns = self.shared_ns = self.opened = 0
        self._mark_ns = 0
        self._stop: Event | None = None

    def allow(self, chunk_divisor: int = 1) -> None:
        """Rollouts may compute from now on, in prefill chunks so much shorter than their own."""
        if self.rollout is not None:
            self.rollout.divide_chunks(chunk_divisor)
        if self._stop is not None:
            self._stop.cancel()
            self._stop = None
        if not self.may_compute:
            self._account()
            self.may_compute = True
            self.opened += 1
            self.update()

    def forbid(self, after_s: float = 0.0) -> float | None:
        """Rollouts stop after a delay and after the step or chunk that is on the GPU.

        What has been launched is not taken back, so the rest of the step still runs.

        Returns:
            Seconds until they stand still; None: they do, or were told before.
        """
        if not self.may_compute or self._stop is not None:
            return None
        rest = 0.0
        if self.rollout is not None and self.rollout.speed > 0:
            rest = self.rollout.residual() / self.rollout.speed
        if after_s + rest <= 0.0:
            self._halt()
        else:
            self._stop = self._clock.after(after_s + rest, self._halt)
        return after_s + rest

    def attach(self, rollout: BatchEngine | None) -> None:
        """A rollout engine has come, or has gone."""
        self._account()
        self.rollout = rollout
        self.update()

    def _halt(self) -> None:
        self._stop = None
        self._account()
        self.may_compute = False
        self.update()

    def _account(self) -> None:
        now = self._clock.now_ns
        elapsed, self._mark_ns = now - self._mark_ns, now
        if self.may_compute and self.rollout is not None:
            self.computing_ns += elapsed
            if self._both():
                self.shared_ns += elapsed

    def _both(self) -> bool:
        return (
            self.may_compute
            and self.rollout is not None
            and self.serving is not None
            and self.rollout.speed > 0
            and self.serving.speed < 1
        )

    def update(self) -> None:
        """Divide the device anew; called whenever an engine begins or ceases to have work."""
        self._account()
        serves = self.serving is not None and self.serving.busy
        rolls = self.rollout is not None and self.may_compute and self.rollout.busy
        sharing = self._sharing
        if self.serving is not None:
            slow = serves and rolls and not sharing.yielding
            self.serving.set_speed(1 / sharing.serving_slowdown if slow else 1.0)
        if self.rollout is not None:
            speed = 1 / sharing.rollout_alone if self.may_compute else 0.0
            if serves and self.may_compute:
                speed = 0.0 if sharing.yielding else 1 / sharing.rollout_slowdown
            self.rollout.set_speed(speed)

    def finish(self) -> None:
        """Count up to now."""
        self._account()
        for engine in (self.serving, self.rollout):
            if engine is not None:
                engine.settle()
