"""``python -m bench.rewards``: figures of reward functions and batches.

| part | on |
|---|---|
| how busy workers are that follow the wish, beside a fixed pool | virtual time |
| groups with and without a second worker for what is late | virtual time |
| what rewards add to a step, by part and by how the trainer takes groups | virtual time |
| 10,000 rewards while gateway, workers and a judge's router are killed | real processes |
| 10,000 lines while router, batches and engines are killed | real processes, fake engines |
| 10,000 lines while gates move as bursts make production's guard move them | the same |

Ends with 1 when a reward or a line was lost, doubled or silently 0.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from bench.record import Figure, figure, record
from bench.rewards import bursts, hedging, killed, scaling, steps


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.rewards", description=__doc__)
    add = parser.add_argument
    add("--rewards", type=int, default=10_000, help="under kills; 0 leaves them out")
    add("--lines", type=int, default=10_000, help="of the batch; 0 leaves it out")
    add("--seconds", type=float, default=1800.0, help="simulated; 0 leaves virtual time out")
    add("--seed", type=int, default=1, help="of kills and of hedging")
    add("--step-seeds", type=int, nargs="+", default=[1, 2, 3], help="of the simulated job")
    # Not ``choices``: it refuses a list that is empty.
    add("--trainers", nargs="*", default=list(steps.USUAL), help=f"of {list(steps.TRAINERS)}")
    add("--settings", nargs="*", default=list(scaling.USUAL), help=f"of {list(scaling.SETTINGS)}")
    add("--processes", type=int, default=1, help="seeds of virtual time that run side by side")
    return parser


def _figures(name: str, found: killed.Killed, wrong: tuple[str, ...]) -> list[Figure]:
    for reason, times in found.reasons.most_common():
        sys.stderr.write(f"{name}: {times} x {reason}\n")
    kills = [figure(f"{name}: killed {what}", n, "times") for what, n in found.kills.items()]
    return [
        figure(f"{name}: asked", found.asked, "times"),
        *(figure(f"{name}: {one}", found.wrong[one], "times", at_most=0) for one in wrong),
        *kills,
        figure(f"{name}: took", found.seconds, "s"),
    ]


def _burst(found: bursts.Burst) -> list[Figure]:
    title = "lines under bursts: "
    return [
        figure(f"{title}asked", found.asked, "times"),
        *(
            figure(f"{title}{how}", found.wrong[how], "times", at_most=0)
            for how in ("lost", "doubled")
        ),
        figure(f"{title}gates shut", found.closures, "times"),
        figure(f"{title}gates shut, of the engines' time", found.shut_share, "share"),
        figure(f"{title}iterations begun behind a shut gate", found.begun_shut, "times", at_most=0),
        figure(f"{title}took", found.seconds, "s"),
    ]


def _virtual(given: argparse.Namespace, spread: steps.Spread) -> list[Figure]:
    seconds, seeds = given.seconds, given.step_seeds
    rows = scaling.figures(seconds, seeds, given.settings, spread)
    rows += hedging.figures(given.seed)
    return rows + (steps.figures(seconds, seeds, given.trainers, spread) if given.trainers else [])


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 when something was lost, doubled or silently 0."""
    parser = flags()
    given = parser.parse_args(argv)
    for flag, asked, known in (
        ("--trainers", given.trainers, steps.TRAINERS),
        ("--settings", given.settings, scaling.SETTINGS),
    ):
        if unknown := [one for one in asked if one not in known]:
            names = ", ".join(map(repr, known))  # some have a comma
            parser.error(f"{flag} knows no {unknown[0]!r}; it takes {names}")
    if given.processes < 1:
        parser.error("--processes must be at least 1")
    figures: list[Figure] = []
    wrong = 0
    if given.rewards:
        found = asyncio.run(killed.rewards(given.rewards, given.seed))
        wrong += found.wrong.total()
        figures += _figures("rewards", found, ("lost", "masked", "doubled", "zero"))
    if given.lines:
        found = asyncio.run(killed.batch(given.lines, given.seed))
        wrong += found.wrong.total()
        figures += _figures("lines", found, ("lost", "doubled"))
        met = asyncio.run(bursts.batch(given.lines, given.seed))
        wrong += met.wrong.total() + met.begun_shut
        figures += _burst(met)
    if given.seconds:
        if given.processes == 1:
            figures += _virtual(given, map)
        else:
            # Spawned: a fork of a process with threads may wait forever for a lock.
            fresh = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(given.processes, fresh) as pool:
                figures += _virtual(given, pool.map)
    record("rewards", figures)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
