"""A fleet scenario: curves first, from single events, then the bins; and its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from rose_core.rollouts.placement.selection import PolicyName
from rose_simulate.model.errors import ScenarioError
from rose_simulate.model.fleets.curves import (
    Alone,
    Curve,
    Lender,
    by_itself,
    curve,
    dedicated_tokens_per_s,
)
from rose_simulate.model.fleets.fleet import FleetOutcome, FleetRun
from rose_simulate.model.outcome import Interval, gpu_hours_won, paired_ratio
from rose_simulate.model.regimes import RULES, RegimeRules
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.runs.study import price_of_violation

# Requests per second and replica at which a replica is simulated event by event: up to what the
# densest bin of the traces shipped brings (code, 26 times a mean of 0.5).
LOADS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)


class FleetResult(msgspec.Struct, frozen=True):
    """Everything of one fleet scenario; holds no time and no machine."""

    scenario: str
    outcomes: tuple[FleetOutcome, ...]


def run_fleet(
    scenario: FleetScenario,
    material: SimulationInputs,
    progress: Callable[[FleetOutcome], None],
    derates: Sequence[float] = (),
    loads: Sequence[float] = (),
) -> FleetResult:
    """Every derate (empty: the scenario's), regime and seed.

    Args:
        scenario: the fleet.
        material: traces.
        progress: told of every run that is over.
        derates: empty = the scenario's.
        loads: requests per second at which a replica is simulated by events; empty = ``LOADS``.

    Raises:
        ScenarioError: two regimes differ in nothing that a fleet has.
    """
    _refuse_same(scenario.regimes)
    outcomes: list[FleetOutcome] = []
    for derate in derates or (scenario.derate,):
        here = scenario.model_copy(update={"derate": derate})
        alone = {seed: alone_of(here, material, seed, loads) for seed in scenario.seeds}
        known: dict[tuple[RegimeRules, int], tuple[Curve, ...]] = {}
        for regime in scenario.regimes:
            # A replica that is lent gives the same whoever lends it and places turns elsewhere.
            rules = replace(RULES[regime], by_demand=True, placement=PolicyName.JOINT)
            for seed in scenario.seeds:
                if (rules, seed) not in known:
                    known[rules, seed] = curves_of(
                        here, regime, material, seed, alone=alone[seed], loads=loads
                    )
                outcomes.append(run_bins(here, regime, seed, material, known[rules, seed]))
                progress(outcomes[-1])
    return FleetResult(scenario.name, tuple(outcomes))


def _refuse_same(regimes: Sequence[Regime]) -> None:
    """Refuse regimes that would be the same run once more under another name.

    Raises:
        ScenarioError: no turn is placed in bins, and these differ in placement alone.
    """
    first: dict[RegimeRules, Regime] = {}
    for regime in regimes:
        same = first.setdefault(replace(RULES[regime], placement=PolicyName.JOINT), regime)
        if same is not regime:
            message = (
                f"regimes: {regime} is {same} in a fleet, which places no turn: leave one of them"
                " out, or compare them in a scenario of single events"
            )
            raise ScenarioError(message)


def run_bins(
    scenario: FleetScenario,
    regime: Regime,
    seed: int,
    material: SimulationInputs,
    curves: tuple[Curve, ...],
) -> FleetOutcome:
    """One run, whose replicas give what the curves say."""
    fleet = FleetRun(
        scenario,
        regime,
        seed,
        curves=curves,
        dedicated=dedicated_tokens_per_s(
            scenario.jobs.job, scenario.derate, material.episodes, seed
        ),
        traces=material.traces,
        episodes=material.episodes,
        shapes=material.shapes,
    )
    return fleet.run()


def against(result: FleetResult, one: FleetOutcome, regime: Regime) -> Interval | None:
    """Tokens of a regime relative to another's at the same derate, paired by seed."""
    ours, base = (
        [o.tokens_per_s for o in result.outcomes if (o.regime, o.derate) == (name, one.derate)]
        for name in (one.regime, regime.value)
    )
    if one.regime == regime or len(ours) != len(base) or not all((*ours, *base)):
        return None
    return paired_ratio(ours, base)


def won(result: FleetResult, ones: Sequence[FleetOutcome]) -> tuple[float, float | None] | None:
    """Dedicated GPU-hours that runs of one regime won, and those for each added violation.

    The second is the shadow price of a violation, None where none was added; all is None where the
    fixed pool was not run at the same derate and seeds.
    """
    cells = {(one.derate, one.seed) for one in ones}
    fixed = [
        one
        for one in result.outcomes
        if one.regime == Regime.FIXED and (one.derate, one.seed) in cells
    ]
    if len(fixed) != len(ones) or any(one.regime == Regime.FIXED for one in ones):
        return None
    rates = [sum(one.tokens_per_s for one in runs) for runs in (ones, fixed)]
    seconds = sum(one.seconds for one in ones)
    hours = gpu_hours_won(ones[0].dedicated_gpus, seconds, *rates)
    added = sum(one.added_violations for one in ones)
    return hours, hours / added if added else None


def alone_of(
    scenario: FleetScenario, material: SimulationInputs, seed: int, loads: Sequence[float] = ()
) -> list[Alone]:
    """Each kind of service with nothing lent."""
    return [
        by_itself(
            Lender(one.service, scenario.jobs.job, Regime.FIXED, scenario.derate),
            loads=loads or LOADS,
            trace=material.traces[one.service.load.trace],
            seed=seed,
        )
        for one in scenario.services
    ]


def curves_of(
    scenario: FleetScenario,
    regime: Regime,
    material: SimulationInputs,
    seed: int,
    *,
    alone: list[Alone],
    loads: Sequence[float] = (),
) -> tuple[Curve, ...]:
    """Each kind of service when lent; drawn with the run's seed, as they hold its randomness."""
    return tuple(
        curve(
            Lender(one.service, scenario.jobs.job, regime, scenario.derate),
            loads=loads or LOADS,
            trace=material.traces[one.service.load.trace],
            pool=material.episodes,
            seed=seed,
            alone=known,
        )
        for one, known in zip(scenario.services, alone, strict=True)
    )


def fleet_table(result: FleetResult) -> str:
    """The outcomes as text."""
    head = (
        "derate  regime                seed  GPUs     useful tok/s  trajectories  dropped  steps  "
        "full   lent   open   worth  added violations (inside, spared)   alone                "
        "GPU-h won, per violation"
    )
    lines = [
        f"{one.derate:<7g} {one.regime:<21} {one.seed:<5} {one.gpus:<7} {one.tokens_per_s:>13.0f}  "
        f"{one.finished:>12}  {one.dropped:>7}  {one.steps:>5}  {one.full_share:<6.1%} "
        f"{one.lent_share:<6.1%} {one.open_share:<6.1%} {one.lent_worth:<6.2f} {_added(one):<34}  "
        f"{f'{one.violations_alone:.0f}/{one.requests}':<20} {_price(result, one)}"
        for one in result.outcomes
    ]
    return "\n".join([head, *lines])


def _price(result: FleetResult, one: FleetOutcome) -> str:
    found = won(result, [one])
    return "-" if found is None else f"{found[0]:.1f}, {price_of_violation(found[1])}"


def _added(one: FleetOutcome) -> str:
    return f"{one.added_violations:.0f} ({one.added_inside:.0f}, {one.spared_violations:.0f})"
