"""``python -m bench.rewards``: figures of reward functions and batches.

| part | on |
|---|---|
| how busy workers are that follow the wish, beside a fixed pool | virtual time |
| what rewards add to a step | virtual time |
| 10,000 rewards while gateway and workers are killed | real processes |
| 10,000 lines while router, batches and engines are killed | real processes, fake engines |

Ends with 1 when a reward or a line was lost, doubled or silently 0.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from bench.record import Figure, figure, record
from bench.rewards import killed, scaling
from rose_simulate.model.clock import SECOND
from rose_simulate.model.job import JobCounts
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenario import Regime, Scenario
from rose_simulate.model.simulation import Simulation
from rose_simulate.reading import read_material, read_scenario
from rose_simulate.studies import SCENARIOS

_REWARD_S = 10.0
_TARGETS_S, _COLD_S, _MOST = (15.0, 30.0), 3.0, 512


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.rewards", description=__doc__)
    add = parser.add_argument
    add("--rewards", type=int, default=10_000, help="under kills; 0 leaves them out")
    add("--lines", type=int, default=10_000, help="of the batch; 0 leaves it out")
    add("--seconds", type=float, default=1800.0, help="simulated; 0 leaves virtual time out")
    add("--seed", type=int, default=1)
    return parser


def _played(seconds: float, seed: int, reward_s: float) -> JobCounts:
    path = SCENARIOS / "tail-whole.yaml"
    told = read_scenario(path)
    if not isinstance(told, Scenario):
        raise TypeError(path)
    jobs = tuple(job.model_copy(update={"reward_s": reward_s}) for job in told.jobs)
    told = told.model_copy(update={"jobs": jobs, "seconds": seconds})
    world = Simulation(told, RULES[Regime.OURS], seed, read_material(path, told))
    world.clock.run(round(seconds * SECOND))
    return world.jobs[jobs[0].name].counts


def virtual(seconds: float, seed: int) -> list[Figure]:
    """What rewards add to a step, and how busy workers are."""
    without, given = (_played(seconds, seed, one) for one in (0.0, _REWARD_S))
    # The same rounds of both: rounds differ by a factor of three, and one more or less of them
    # would show as time that rewards add.
    rounds = min(len(without.step_s), len(given.step_s))
    steps = [sum(one.step_s[:rounds]) / rounds for one in (without, given)]
    added = steps[1] - steps[0]
    ends = sorted(given.finish_s)
    takes = scaling.lengths(len(ends), _REWARD_S, seed)
    found: list[Figure] = []
    for target in _TARGETS_S:
        ours = scaling.followed(ends, takes, target_s=target, cold_s=_COLD_S, most=_MOST)
        pool = scaling.smallest(ends, takes, ours.wait_p99_s)
        told = f"target {target:g} s: "
        found += [
            figure(
                f"{told}workers that follow the wish, busy", ours.busy_share, "share", at_least=0.9
            ),
            figure(f"{told}fixed pool with the same p99 wait, busy", pool.busy_share, "share"),
            figure(f"{told}wait of a reward, p99", ours.wait_p99_s, "s"),
            figure(f"{told}most workers at a time", ours.most, "workers"),
            figure(f"{told}fixed pool", pool.most, "workers"),
        ]
    return [
        *found,
        figure(f"a reward of {_REWARD_S:g} s hidden", 1 - added / _REWARD_S, "share", at_least=0.9),
        figure("added to a step", added / steps[0], "share", at_most=0.01),
        figure("steps without rewards that take time", len(without.step_s), "steps"),
        figure("steps with them", len(given.step_s), "steps"),
    ]


def _told(name: str, found: killed.Killed, wrong: tuple[str, ...]) -> list[Figure]:
    kills = [figure(f"{name}: killed {what}", n, "times") for what, n in found.kills.items()]
    return [
        figure(f"{name}: asked", found.asked, "times"),
        *(figure(f"{name}: {one}", found.wrong[one], "times", at_most=0) for one in wrong),
        *kills,
        figure(f"{name}: took", found.seconds, "s"),
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 when something was lost, doubled or silently 0."""
    given = flags().parse_args(argv)
    figures: list[Figure] = []
    wrong = 0
    if given.rewards:
        found = asyncio.run(killed.rewards(given.rewards, given.seed))
        wrong += found.wrong.total()
        figures += _told("rewards", found, ("lost", "doubled", "zero"))
    if given.lines:
        found = asyncio.run(killed.batch(given.lines, given.seed))
        wrong += found.wrong.total()
        figures += _told("lines", found, ("lost", "doubled"))
    if given.seconds:
        figures += virtual(given.seconds, given.seed)
    record("rewards", figures)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
