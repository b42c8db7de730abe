"""What rewards that take time add to a training step, and what of it is which wait.

The simulator plays the same job with rewards that take no time and with rewards that take
``REWARD_S``, paired by seed; long and short rounds count by their shares in the long run. A step of
a job is the sum of its parts (``rose_simulate.model.jobs.job.StepParts``), so what is added is
measured part by part, and not guessed.

| a trainer | begins with a group | begins the next step's rollouts |
|---|---|---|
| whole | when the whole round is there | after its step |
| streams | as soon as it is ready (``Batches(stream=True)``) | after its step |
| n late | as whole or streams; it waits for all groups' rewards but those of n | after its step |
| late as learned | the same with as few as hide the rewards (``lateness``) | after its step |
| overlaps by n | when a step's groups are there, the oldest first | up to n versions ahead of it |

A step of the first two ends after its last reward, which no rollout of that step can hide. With
``RoundShape(late=1)`` the next step's rollouts hide it, and that group is trained on one version
late. Where the last two groups of a round end within a reward's time of each other, the second
shows. A job that overlaps has the next steps' rollouts to hide all behind, as far as its bound lets
them begin.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from bench.record import Figure, figure
from bench.scenarios import scenario
from rose_core.stats import mean_of
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.jobs.job import Job, JobCounts, StepParts
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.model.simulation import Simulation

REWARD_S: Final = 10.0
_LONG_SHARE: Final = 0.2  # of the rounds of ``tail-whole``: a short one starts a quarter too many
_AIM: Final = 0.01
TRAINERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "whole": {},
    "streams": {"streams": True},
    "whole, one late": {"late": 1},
    "streams, one late": {"streams": True, "late": 1},
    "whole, two late": {"late": 2},
    "streams, two late": {"streams": True, "late": 2},
    "whole, late as learned": {"late": "learned"},
    "streams, late as learned": {"streams": True, "late": "learned"},
    # The first is what trainers call one-step off-policy.
    **{
        f"overlaps by {versions}": {
            "surplus": None,
            "member_surplus": 0.0,
            "staleness": versions,
            "oldest_first": True,
        }
        for versions in (1, 3)
    },
}
USUAL: Final = ("whole", "streams", "whole, late as learned", "streams, late as learned")
"""Those that decide something; the others take as long again."""
LAST_REWARD: Final = "the last reward"
_PARTS: Final[Mapping[str, Callable[[StepParts], float]]] = {
    "rollouts, to their last token": lambda part: part.rollout_s,
    LAST_REWARD: lambda part: part.reward_s,
    "training after it": lambda part: part.train_s,
}


@dataclass(frozen=True)
class Added:
    """What rewards added to the steps of one seed, as means of usual rounds.

    Attributes:
        before_s, after_s: a step without rewards that take time, and with them.
        parts: seconds that were added, by part.
        stale: of the trajectories trained on with them, sampled by an older version.
    """

    before_s: float
    after_s: float
    parts: Mapping[str, float]
    stale: float

    @property
    def share(self) -> float:
        """Change of the length of a step, as a share of its length before."""
        return (self.after_s - self.before_s) / self.before_s

    @property
    def last_reward(self) -> float:
        """Of the step without it: chance in the rollouts of the two runs is not in that."""
        part = self.parts[LAST_REWARD]
        return part / (self.after_s - part)

    @property
    def hidden(self) -> float:
        """Of the time that the last reward takes, what no step waits for."""
        return 1 - self.parts[LAST_REWARD] / REWARD_S


_Asked_contra = TypeVar("_Asked_contra", contravariant=True)
_Found_co = TypeVar("_Found_co", covariant=True)


class Spread(Protocol):
    """``map``, or that of a pool of processes: seeds know nothing of each other."""

    def __call__(
        self, run: Callable[[_Asked_contra], _Found_co], of: Iterable[_Asked_contra], /
    ) -> Iterable[_Found_co]:
        """What ``run`` finds of each, in their order."""


Begin = Callable[[VirtualClock, Job, int], None]
"""Told of a job before it runs, and of how many of a group's members it trains on."""


def played(
    trainer: str, seconds: float, seed: int, reward_s: float, begin: Begin | None = None
) -> JobCounts:
    """One run of ``tail-whole``'s job; ``trainer`` as in the table above."""
    setup, material = scenario("tail-whole")
    changes = {**TRAINERS[trainer], "reward_s": reward_s}
    jobs = tuple(job.model_copy(update=changes) for job in setup.jobs)
    setup = setup.model_copy(update={"jobs": jobs, "seconds": seconds})
    world = Simulation(setup, RULES[Regime.OURS], seed, material)
    job = world.jobs[jobs[0].name]
    if begin is not None:
        begin(world.clock, job, jobs[0].group)
    world.clock.run(round(seconds * SECOND))
    return job.counts


def usual(steps: Sequence[StepParts]) -> dict[str, float]:
    """Parts of a step in the long run, from a run of few rounds.

    Long rounds take twice as long as short ones, and a run may hold one more or less of them, or
    one more of the next round, than another. So each kind counts by its share in the long run: as
    many prompts are put off as short rounds start too many. The first round begins from nothing.
    """
    later = steps[1:] or steps
    kinds = [[one for one in later if one.long], [one for one in later if not one.long]]
    shares = [_LONG_SHARE, 1 - _LONG_SHARE] if all(kinds) else [1.0, 1.0]
    return {
        name: sum(
            share * statistics.fmean(map(part, kind))
            for share, kind in zip(shares, kinds, strict=True)
            if kind
        )
        for name, part in _PARTS.items()
    }


def compared(without: Sequence[StepParts], given: Sequence[StepParts], stale: float = 0.0) -> Added:
    """Usual steps of both."""
    means = [usual(steps) for steps in (without, given)]
    before, after = (sum(one.values()) for one in means)
    return Added(before, after, {name: means[1][name] - means[0][name] for name in _PARTS}, stale)


def stale_share(counts: JobCounts) -> float:
    """Of the trajectories that were trained on, those sampled by an older version."""
    trained = [fate for fate in counts.fates if fate.trained]
    return sum(fate.stale > 0 for fate in trained) / len(trained) if trained else 0.0


def _beside(
    trainer: str, seconds: float, seed: int
) -> tuple[Sequence[StepParts], Sequence[StepParts], float]:
    """Steps of a seed without rewards that take time and with them, and what was stale of these."""
    without, given = (played(trainer, seconds, seed, one) for one in (0.0, REWARD_S))
    return without.step_parts, given.step_parts, stale_share(given)


def figures(
    seconds: float,
    seeds: Sequence[int],
    trainers: Collection[str] = TRAINERS,
    spread: Spread = map,
) -> list[Figure]:
    """What rewards add under each trainer, the whole batch's first; needs a step of each run."""
    rows: list[Figure] = []
    whole: list[float] = []
    waited: dict[str, list[Sequence[StepParts]]] = {}
    for trainer in TRAINERS:
        if trainer != "whole" and trainer not in trainers:
            continue  # all are compared with the whole batch
        both = list(spread(partial(_beside, trainer, seconds), seeds))
        found = [compared(*one) for one in both]
        after = [given for _, given, _ in both]
        whole = whole or [one.before_s for one in found]
        title = f"{trainer}, rewards of {REWARD_S:g} s: "
        rows += [
            mean(f"{title}added to a step", [one.share for one in found], "share", at_most=_AIM),
            mean(
                f"{title}the last reward alone, of the step without it",
                [one.last_reward for one in found],
                "share",
                at_most=_AIM,
            ),
            mean(
                f"{title}hidden, of the last reward",
                [one.hidden for one in found],
                "share",
                at_least=0.9,
            ),
            mean(f"{title}a version old or more", [one.stale for one in found], "share"),
            *(
                mean(f"{title}added by {part}", [one.parts[part] for one in found], "s")
                for part in _PARTS
            ),
            mean(f"{trainer}: a step without rewards", [one.before_s for one in found], "s"),
            mean(f"{title}a step", [one.after_s for one in found], "s"),
            mean(
                f"{title}a step, x the whole batch without rewards",
                [one.after_s / base for one, base in zip(found, whole, strict=True)],
                "x",
            ),
        ]
        for other in _comparable(trainer, waited):
            rows += _beyond(title, other, waited[other], after)
        waited[trainer] = after
    step_s = sum(whole) / len(whole)
    name = "whole: a last reward as long as this adds 1 %"
    return [*rows, figure(name, _AIM * step_s, "s")]


def _comparable(trainer: str, others: Collection[str]) -> list[str]:
    """The whole batch's, and who begins with groups as this one does."""
    base = trainer.partition(", ")[0]
    return [one for one in others if one == "whole" or one.partition(", ")[0] == base]


def _beyond(
    title: str,
    other: str,
    base: Sequence[Sequence[StepParts]],
    after: Sequence[Sequence[StepParts]],
) -> list[Figure]:
    """Steps beside another trainer's with the same rewards, paired by seed."""
    found = [compared(*pair) for pair in zip(base, after, strict=True)]
    return [
        mean(f"{title}a step, x {other} with them", [1 + one.share for one in found], "x"),
        *(
            mean(f"{title}{part}, beyond {other}", [one.parts[part] for one in found], "s")
            for part in _PARTS
        ),
    ]


def mean(name: str, values: Sequence[float], unit: str, **aim: float) -> Figure:
    """A mean over seeds with its 95 % interval."""
    found = mean_of(values)
    ends = None if found.low is None or found.high is None else (found.low, found.high)
    return figure(name, found.mean, unit, interval=ends, **aim)
