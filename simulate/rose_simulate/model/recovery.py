"""How long the rollouts of a whole pool are gone after a burst that hits all replicas at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from rose_simulate.model.scenario import Scenario
from rose_simulate.model.simulation import Simulation

SHARE = 0.9


def recoveries(world: Simulation, scenario: Scenario) -> Iterator[float]:
    """Per burst: seconds from its second until ``SHARE`` of the gates are open again.

    The next burst or the end bounds it; a burst that finds no open gate gives nothing.
    """
    periods = [
        (one.load.offset_s, one.load.burst_every_s)
        for one in scenario.services
        if one.load.burst_every_s
    ]
    if not periods:
        return
    first, every = periods[0]
    end = scenario.warmup_s + scenario.seconds
    times, levels = _levels(world)
    at = first
    while at < end:
        if at >= scenario.warmup_s:
            yield from _recovery(times, levels, at, min(at + every, end))
        at += every


def _levels(world: Simulation) -> tuple[list[float], list[int]]:
    """Number of open gates after each move."""
    times, levels, level = [0.0], [0], 0
    for time_s, change in world.gate_moves:
        level += change
        times.append(time_s)
        levels.append(level)
    return times, levels


def _recovery(times: list[float], levels: list[int], at: float, until: float) -> Iterator[float]:
    start = bisect_left(times, at)
    before = levels[start - 1] if start else 0
    if before <= 0:
        return
    fallen = False
    for index in range(start, len(times)):
        if times[index] >= until:
            break
        fallen = fallen or levels[index] < SHARE * before
        # Back for good: the burst lasts a second, and gates flicker inside it.
        if fallen and levels[index] >= SHARE * before and times[index] >= at + 1.0:
            yield times[index] - at
            return
    yield until - at if fallen else 0.0
