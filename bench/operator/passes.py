"""``python -m bench.operator.passes``: processor time of one pass, without network or API server.

| pass | what has happened since the one before |
|---|---|
| first | everything is new |
| at rest | every agent has reported again, with other figures and nothing that matters |
| one change | a fifth of the agents have reported, a serving pod is new, a lease was resized |

A pass spends this between two ``await``; ``bench.operator`` measures the same on a real API server.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.operator.fleet import FULL, QUICK, Fleet
from bench.operator.memory import Inside
from bench.record import Figure, figure, record
from rose_operator.kube.api import ObjectKind


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.operator.passes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the fleet")
    parser.add_argument("--passes", type=int, default=24, help="of each kind")
    parser.add_argument("--profile", type=Path, help="where the time of passes goes, for pstats")
    return parser


async def measured(
    inside: Inside, passes: int, happen: Callable[[int], None], seconds: float
) -> list[float]:
    """Processor time of each pass after something has happened."""
    spent = []
    for number in range(passes):
        inside.now += seconds
        happen(number)
        await inside.reconciler.run_pass()
        spent.append(inside.reconciler.worked_seconds)
    return sorted(spent)


async def run(fleet: Fleet, passes: int) -> list[Figure]:
    """All kinds of passes."""
    inside = Inside(fleet)
    inside.report()
    await inside.reconciler.run_pass()
    figures = [figure("first pass", inside.reconciler.worked_seconds, "s")]
    await inside.settle()

    def rest(_: int) -> None:
        inside.report()

    def change(number: int) -> None:
        nodes = list(inside.agents)[number % 5 :: 5]
        inside.agents[nodes[number % len(nodes)]].restart_a_pod()
        inside.report(nodes)
        lease = fleet.lease(f"grpo-{number % fleet.leases}", number % fleet.pools, 1 + number % 3)
        inside.put(ObjectKind.LEASE, lease)

    writes = inside.api.writes
    resting = await measured(inside, passes, rest, 5.0)
    figures += _of("at rest", resting)
    figures.append(figure("at rest, writes", inside.api.writes - writes, "", at_most=0))
    figures += _of("one change", await measured(inside, passes, change, 1.0))
    since = time.process_time()
    for _ in range(passes):
        inside.report()
    spent = (time.process_time() - since) / passes / fleet.nodes
    figures.append(figure("a report taken in (with its making)", spent * 1e6, "us"))
    return figures


def _of(name: str, spent: list[float]) -> list[Figure]:
    return [
        figure(f"{name}, median", spent[len(spent) // 2], "s"),
        figure(f"{name}, most", spent[-1], "s", at_most=1.0),
    ]


def main() -> int:
    """Measure and report."""
    given = flags().parse_args()
    fleet = (QUICK if given.quick else FULL).fleet
    profile = cProfile.Profile(time.process_time) if given.profile else None
    if profile is not None:
        profile.enable()
    figures = asyncio.run(run(fleet, given.passes))
    if profile is not None:
        profile.disable()
        profile.dump_stats(given.profile)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        return 0  # a profiler's figures are no figures
    record("operator-passes", figures, notes=[f"{fleet.nodes} nodes, {fleet.replicas} replicas"])
    return 0 if all(one.met is not False for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
