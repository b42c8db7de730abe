"""Is the learning real? Fixed prompts, a frozen control and a shuffled-advantage control.

Three policies answer the same evaluation tasks with the same random numbers: the one being
trained, the one it started from (*frozen*), and one that takes the very same steps on the very
same tokens but with advantages handed to other trajectories (*shuffled*). The trained policy must
beat the frozen one by more than chance; the shuffled one must not rise, else the reward did not
come from the reward signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from examples.grpo.learner import Policy
from examples.grpo.task import Task

REPEATS = 4
"""Times each evaluation task is answered; more answers, narrower interval."""

CONTROL_MARGIN = 0.05
"""Reward by which a random walk of the weights may move the shuffled control."""


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """Mean rewards on the fixed tasks, and rises over the frozen policy.

    Attributes:
        learned: the rise of the trained policy is above 0 beyond the interval.
        control_flat: the shuffled control rose by less than ``CONTROL_MARGIN``, or not beyond
            its interval.
    """

    trained: float
    frozen: float
    shuffled: float
    rise: Interval
    control_rise: Interval
    learned: bool
    control_flat: bool

    def record(self) -> dict[str, object]:
        """As plain values for a progress line."""
        return asdict(self)


def paired_interval(
    before: Sequence[float], after: Sequence[float], *, seed: int = 0, resamples: int = 2000
) -> Interval:
    """Bootstrap over tasks of the mean of ``after - before``.

    Raises:
        ValueError: the sequences differ in length or are empty.
    """
    if not before or len(before) != len(after):
        message = f"paired values needed, got {len(before)} and {len(after)}"
        raise ValueError(message)
    difference = np.subtract(after, before)
    draws = np.random.default_rng(seed).integers(0, len(difference), (resamples, len(difference)))
    low, high = np.quantile(difference[draws].mean(axis=1), [0.025, 0.975])
    return Interval(float(difference.mean()), float(low), float(high))


def answer(policy: Policy, tasks: Sequence[Task], seed: int) -> list[float]:
    """Mean reward per task over ``REPEATS`` answers."""
    repeated = [task for task in tasks for _ in range(REPEATS)]
    rewards = np.array(policy.rewards(repeated, seed)).reshape(len(tasks), REPEATS)
    means: list[float] = rewards.mean(axis=1).tolist()
    return means


def judge(
    trained: Sequence[float], frozen: Sequence[float], shuffled: Sequence[float]
) -> Evaluation:
    """Compare the three policies' rewards on the same tasks."""
    rise = paired_interval(frozen, trained)
    control = paired_interval(frozen, shuffled)
    return Evaluation(
        trained=float(np.mean(trained)),
        frozen=float(np.mean(frozen)),
        shuffled=float(np.mean(shuffled)),
        rise=rise,
        control_rise=control,
        learned=rise.low > 0,
        control_flat=control.mean < CONTROL_MARGIN or control.low <= 0,
    )
