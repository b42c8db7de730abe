"""What the gate lends of a replica that is never idle, and what an offline search would have."""

from __future__ import annotations

import pytest

from rose_core.guard.crossover import quantile
from rose_core.guard.predictor import Predictor
from rose_core.guard.slack import Objective
from tests.guard.closed_loop import Guarded, Machine, World, fixed

SECONDS = 40
SHARES = (0.04, 0.08, 0.12, 0.16, 0.2, 0.3, 0.5, 0.75, 1.0)
MACHINES = {
    "steady": Machine(),
    "busier": Machine(gap_ms=225.0),
    "noisy": Machine(noise=0.4),
    "harmful": Machine(slowdown=4.0),
    "harmless": Machine(slowdown=1.3),
    "short answers": Machine(outputs=(3, 40), gap_ms=100.0),
    "long prefills": Machine(prefill_ms=200.0, step_ms=25.0, gap_ms=900.0, iteration_ms=35.0),
}


def objective(machine: Machine) -> Objective:
    """Twice the 99th percentile of serving alone, on other arrivals."""
    alone = World(machine, 101, 10).run(fixed(0.0)).done
    ttft = quantile([asked.ttft_ms for asked in alone], 0.99)
    tpot = quantile([asked.tpot_ms for asked in alone], 0.99)
    return Objective(2e-3 * ttft, 2e-3 * tpot)


def slow(world: World, goals: Objective) -> int:
    return sum(
        asked.ttft_ms > 1e3 * goals.ttft_s or asked.tpot_ms > 1e3 * goals.tpot_s
        for asked in world.done
    )


def searched(machine: Machine, goals: Objective, allowed: int) -> float:
    """The most that a fixed share harvests without an added violation."""
    worlds = [
        World(machine, 1, SECONDS).run(fixed(share, period))
        for share in SHARES
        for period in (100, 400)
    ]
    return max((w.harvested for w in worlds if slow(w, goals) <= allowed), default=0.0)


@pytest.mark.parametrize("name", MACHINES)
def test_no_violation_is_added_and_the_slack_of_an_offline_search_is_lent(name: str) -> None:
    machine = MACHINES[name]
    goals = objective(machine)
    allowed = slow(World(machine, 1, SECONDS).run(fixed(0.0)), goals)
    guarded = Guarded(goals, Predictor())
    world = World(machine, 1, SECONDS).run(guarded.gate, guarded.ended)
    assert len(world.done) > SECONDS / 2
    assert slow(world, goals) <= allowed
    assert world.harvested > 0
    assert world.harvested >= 0.9 * searched(machine, goals, allowed)
