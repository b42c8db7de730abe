"""The rollouts of one job in a fleet: a tank of trajectories that all progress alike, per bin.

| what | how |
|---|---|
| speed | what the engines give when full, less where the trajectories under way do not fill them |
| groups, staleness, training | as in ``job`` |

Next step: ``fleet`` says what the engines give.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rose_simulate.model.fleets.curves import USUAL_CONTEXT
from rose_simulate.model.jobs.workload import ALIKE, Episode
from rose_simulate.model.scenarios.costs import ModelCosts
from rose_simulate.model.scenarios.scenario import RolloutJob

Floats = NDArray[np.float64]
Steps = Callable[[float], float]


@dataclass(frozen=True)
class EngineSupply:
    """What the engines of one job are in one bin.

    Attributes:
        most: tokens per second when every slot is full.
        slots: turns at a time.
    """

    most: float
    slots: float
    engines: float


@dataclass(frozen=True)
class FluidWork:
    """What the tanks of equal jobs share.

    Attributes:
        lengths: output tokens of the episodes that trajectories are drawn from.
        active: share of a trajectory's life in which it is at an engine.
    """

    job: RolloutJob
    own: ModelCosts
    lengths: Floats
    active: float


@dataclass
class FluidJob:
    """The trajectories of one job."""

    work: FluidWork
    draw: np.random.Generator
    left: Floats = field(default_factory=lambda: np.empty(0))
    group: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    born: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    waiting: dict[int, int] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    version: int = 0
    groups: int = 0
    numbered: int = 0
    training_until: float = -1.0
    finished: int = 0
    accepted: int = 0
    dropped: int = 0
    steps: int = 0
    tokens: float = 0.0

    @property
    def turns(self) -> int:
        """Trajectories that are at an engine or would be, now."""
        return round(len(self.left) * self.work.active)

    def advance(self, supply: EngineSupply, now: float, bin_s: float) -> None:
        """One bin."""
        self._start()
        active = len(self.left) * self.work.active
        made = rate(active, supply, self._step) * bin_s
        if len(self.left):
            self.left -= made / len(self.left)
            self.tokens += made
        self._finish()
        if 0 <= self.training_until <= now:
            self.training_until = -1.0
            self.version += 1
            self.steps += 1
        if self.training_until < 0:
            self._train(now)

    def _step(self, batch: float) -> float:
        return self.work.own.step(round(batch), round(batch * USUAL_CONTEXT))[0]

    def _start(self) -> None:
        job = self.work.job
        wanted = (job.staleness + self.version + 1) * job.batch_groups - self.groups
        if wanted <= 0:
            return
        size = wanted * job.group
        fresh = np.arange(self.numbered, self.numbered + wanted)
        numbers = np.repeat(fresh, job.group)
        self.waiting.update(dict.fromkeys(fresh.tolist(), job.group))
        self.groups += wanted
        self.numbered += wanted
        alike = self.draw.random(size) < ALIKE
        base = np.repeat(self.draw.choice(self.work.lengths, wanted), job.group)
        lengths = np.where(alike, base, self.draw.choice(self.work.lengths, size))
        self.left = np.concatenate([self.left, lengths])
        self.group = np.concatenate([self.group, numbers])
        self.born = np.concatenate([self.born, np.full(size, self.version)])

    def _finish(self) -> None:
        done = self.left <= 0
        if not done.any():
            return
        for number, born in zip(self.group[done], self.born[done], strict=True):
            self.waiting[int(number)] -= 1
            if self.waiting[int(number)] == 0:
                del self.waiting[int(number)]
                self.ready.append(int(born))
        self.finished += int(done.sum())
        self.left, self.group, self.born = self.left[~done], self.group[~done], self.born[~done]

    def _train(self, now: float) -> None:
        job = self.work.job
        fresh = [born for born in self.ready if self.version - born <= job.staleness]
        lost = len(self.ready) - len(fresh)
        self.dropped += lost * job.group
        self.groups -= lost  # as in ``job``: a dropped group is started anew
        self.ready = fresh
        if len(fresh) >= job.batch_groups:
            self.ready = fresh[job.batch_groups :]
            self.accepted += job.batch_groups * job.group
            self.training_until = now + job.train_s


def active_share(pool: Rows[Episode], job: RolloutJob) -> float:
    """Share of a trajectory's life in which it is at an engine, at 15 ms per token."""
    gaps = sum(turn.gap_s for one in pool for turn in one) * job.gap_scale
    work = sum(turn.output for one in pool for turn in one) * 0.015
    return work / (work + gaps)


def rate(active: float, supply: EngineSupply, step: Steps) -> float:
    """Tokens per second of ``active`` trajectories over engines that give ``most`` when full.

    Beside the decode step, a token of a full batch of ``slots / engines`` costs the time that
    prefills of the others take; that part shrinks with the batch.
    """
    if active <= 0.0 or supply.most <= 0.0:
        return 0.0
    if active >= supply.slots:
        return supply.most
    full = supply.slots / supply.engines
    batch = max(1.0, active / supply.engines)
    others = max(0.0, supply.slots / supply.most - step(full)) / full
    return min(supply.most, active / (step(batch) + others * batch))
