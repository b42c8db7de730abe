"""State of a run: three policies that started equal, what has been published, what to report.

Everything here is ordinary code of one thread; ``train`` says when which part of it happens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from examples.grpo.client import Counters
from examples.grpo.evaluate import Evaluation, answer, judge
from examples.grpo.learner import (
    Batch,
    Policy,
    StepStatistics,
    make_batch,
    one_version,
    pool,
    sampled_pairs,
)
from examples.grpo.progress import Progress
from examples.grpo.publishing import Weights
from examples.grpo.rollouts import Group, age
from examples.grpo.task import evaluation_tasks
from rose_core.identity import WeightVersion
from rose_trainer.mismatch import MismatchMeter
from rose_trainer.rounds import Late

# Versions whose weights are kept to recompute what an engine should have said.
_KEPT_VERSIONS = 8
# Trajectories recomputed per step, version and kind of engine for the mismatch meter.
_MISMATCH_ROWS = 8


@dataclass(frozen=True)
class Settings:
    """Knobs of a run.

    Attributes:
        seconds: time limit, final evaluation included.
        per_step, group_size: groups per gradient step, trajectories per group.
        max_age: highest age of a trajectory at consumption, in publishes.
        concurrency: most groups in flight.
        rounds: steps are rounds of tail batching instead of overlapping (``grpo.rounds``).
        surplus, member_surplus: groups and trajectories of each that a short round starts beyond
            those of a step, as shares of them; without effect otherwise.
        late: groups whose rewards a round need not wait for; they are in the next step.
            "learned" = as few as hide the rewards.
        publish_every: steps per published version.
        evaluate_seconds: time between evaluations on the fixed tasks.
    """

    model: Path
    seconds: float = 240.0
    per_step: int = 8
    group_size: int = 8
    learning_rate: float = 2e-3
    max_age: int = 3
    concurrency: int = 12
    publish_every: int = 1
    evaluate_seconds: float = 20.0
    seed: int = 0
    rounds: bool = False
    surplus: float = 0.25
    member_surplus: float = 0.25
    late: Late = 0


@dataclass
class Run:
    """State of a run: three policies that started equal, and what has been published."""

    settings: Settings
    weights: Weights
    progress: Progress
    trained: Policy
    frozen: Policy
    shuffled: Policy
    meter: MismatchMeter
    head: WeightVersion | None = None
    step: int = 0
    published: OrderedDict[str, dict[str, torch.Tensor]] = field(default_factory=OrderedDict)
    counters: Counters = field(default_factory=Counters)
    _evaluated: float = float("-inf")
    _added: list[Group] = field(default_factory=list)
    _order: torch.Generator = field(default_factory=torch.Generator)

    def publish(self) -> None:
        """Send the trained policy's weights out and remember them by version."""
        state = self.trained.published_state()
        self.head = self.weights.publish(self.step, self.trained.named_tensors())
        self.published[str(self.head)] = state
        while len(self.published) > _KEPT_VERSIONS:
            self.published.popitem(last=False)
        self.report_published()

    def report_published(self, *, wait: bool = False) -> None:
        """Write a line for every version that has become durable."""
        for done in self.weights.finished(wait=wait):
            self.progress.write("publish", **(asdict(done) | {"version": str(done.version)}))

    def report_mismatch(self) -> None:
        """Engine against trainer log-probs so far, over all and by kind of engine."""
        pools = sorted({place.pool for place in self.meter.rows()})
        self.progress.write(
            "mismatch",
            **asdict(self.meter.total()),
            pools={pool: asdict(self.meter.total(pool=pool)) for pool in pools},
        )

    def add(self, groups: list[Group]) -> None:
        """Add the gradients of these groups, one after the other, to those of the step.

        Whether they come all at once or one by one, the step is the same bit for bit.
        """
        if not self._added:
            self._order = torch.Generator().manual_seed(self.settings.seed + self.step)
        for group in groups:
            part = make_batch([group])
            self.trained.add(part)
            self.shuffled.add(part.shuffled(self._order))
            self._added.append(group)

    def learn(self, groups: list[Group]) -> None:
        """Add the last groups; step the trained policy and its shuffled control, then publish."""
        self.add(groups)
        groups, self._added = self._added, []
        if not groups:
            return
        self._measure_mismatch(make_batch(groups), groups)
        statistics = self.trained.finish()
        self.shuffled.finish()
        self.step += 1
        self._report(groups, statistics)
        if self.step % self.settings.publish_every == 0:
            self.publish()

    def evaluate(self, *, final: bool = False) -> Evaluation:
        """Compare the three policies on the fixed tasks."""
        tasks = evaluation_tasks()
        rewards = [
            answer(policy, tasks, self.settings.seed)
            for policy in (self.trained, self.frozen, self.shuffled)
        ]
        evaluation = judge(*rewards)
        self.report_mismatch()
        self.progress.write(
            "evaluation", step=self.step, tasks=len(tasks), final=final, **evaluation.record()
        )
        return evaluation

    def evaluate_when_due(self, now: float) -> None:
        """``evaluate`` every ``evaluate_seconds``."""
        if now - self._evaluated >= self.settings.evaluate_seconds:
            self._evaluated = now
            self.evaluate()

    def _measure_mismatch(self, batch: Batch, groups: list[Group]) -> None:
        """Engine log-probs against ours under the very version that sampled them."""
        places: dict[tuple[str, str], list[int]] = {}
        members = [member for group in groups for member in group]
        for row, member in enumerate(members):
            version = one_version(member)
            if version is not None and version in self.published:
                places.setdefault((version, pool(member)), []).append(row)
        for (version, kinds), found in places.items():
            rows = found[:_MISMATCH_ROWS]
            recomputed = torch.zeros_like(batch.behaviour)
            state = self.published[version]
            recomputed[rows] = self.trained.logprobs_with(state, batch.tokens[rows])
            behaviour, expected = sampled_pairs(batch, recomputed, rows)
            self.meter.add(behaviour, expected, version=version, pool=kinds)

    def _report(self, groups: list[Group], statistics: StepStatistics) -> None:
        members = [member for group in groups for member in group]
        ages = [age(member, self.head) or 0 for member in members]
        self.progress.write(
            "step",
            step=self.step,
            reward=float(np.mean([member.reward for member in members])),
            version=str(self.head),
            lag=min(ages),
            staleness_mean=float(np.mean(ages)),
            staleness_max=max(ages),
            tokens=self.counters.tokens,
            turns=self.counters.turns,
            trained=len(members),
            correct=sum(member.correct for member in members),
            kept=sum(len(turn.tokens) for member in members for turn in member.turns),
            turn_seconds=float(
                np.median([turn.seconds for member in members for turn in member.turns])
            ),
            **asdict(statistics),
        )


def begin(settings: Settings, weights: Weights, progress: Progress) -> Run:
    """Three equal policies, nothing published yet.

    Raises:
        ModelMismatch: the model does not fit the task.
    """
    trained, frozen, shuffled = (
        Policy(settings.model, learning_rate=settings.learning_rate) for _ in range(3)
    )
    progress.write("start", **{k: str(v) for k, v in asdict(settings).items()})
    return Run(settings, weights, progress, trained, frozen, shuffled, MismatchMeter())
