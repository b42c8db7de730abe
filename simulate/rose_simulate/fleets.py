"""A fleet scenario: curves first, from single events, then the bins; and its table."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rose_core.simulate.curves import Curve, Lender, curve, dedicated_tokens_per_s
from rose_core.simulate.fleet import Fleet, FleetOutcome
from rose_core.simulate.fleet_scenario import FleetScenario
from rose_core.simulate.scenario import Regime
from rose_core.simulate.world import Material

# Requests per second and replica at which a replica is simulated event by event: up to what the
# densest bin of the traces shipped brings (code, 26 times a mean of 0.5).
LOADS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)


class FleetResult(msgspec.Struct, frozen=True):
    """Everything of one fleet scenario; holds no time and no machine."""

    scenario: str
    outcomes: tuple[FleetOutcome, ...]


def run_fleet(
    told: FleetScenario, material: Material, progress: Callable[[FleetOutcome], None]
) -> FleetResult:
    """Every regime and seed."""
    outcomes: list[FleetOutcome] = []
    dedicated = dedicated_tokens_per_s(told.jobs.job, told.derate, material.episodes)
    for regime in told.regimes:
        curves = _curves(told, regime, material)
        for seed in told.seeds:
            fleet = Fleet(
                told,
                regime,
                seed,
                curves=curves,
                dedicated=dedicated,
                traces=material.traces,
                episodes=material.episodes,
                shapes=material.shapes,
            )
            outcomes.append(fleet.run())
            progress(outcomes[-1])
    return FleetResult(told.name, tuple(outcomes))


def _curves(told: FleetScenario, regime: Regime, material: Material) -> tuple[Curve, ...]:
    return tuple(
        curve(
            Lender(one.service, told.jobs.job, regime, told.derate),
            loads=LOADS,
            trace=material.traces[one.service.load.trace],
            pool=material.episodes,
        )
        for one in told.services
    )


def fleet_table(result: FleetResult) -> str:
    """The outcomes as text."""
    head = (
        "regime            seed  GPUs    rollout tok/s  trajectories  dropped  steps  "
        "lent   open   added violations  alone"
    )
    lines = [
        f"{one.regime:<17} {one.seed:<5} {one.gpus:<7} {one.tokens_per_s:>13.0f}  "
        f"{one.finished:>12}  {one.dropped:>7}  {one.steps:>5}  {one.lent_share:<6.1%} "
        f"{one.open_share:<6.1%} {one.added_violations:<16.0f}  "
        f"{one.violations_alone:.0f}/{one.requests}"
        for one in result.outcomes
    ]
    return "\n".join([head, *lines])
