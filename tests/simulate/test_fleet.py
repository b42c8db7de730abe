"""The fleet model: agrees with single events, keeps limits, repeats itself."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rose_simulate.files.reading import read_material, read_scenario
from rose_simulate.model.errors import Impossible, ScenarioError
from rose_simulate.model.fleets.curves import (
    Curve,
    Lender,
    by_itself,
    curve,
    dedicated_tokens_per_s,
)
from rose_simulate.model.fleets.fleet import (
    EngineSupply,
    FleetOutcome,
    FleetRun,
    FluidJob,
    FluidWork,
)
from rose_simulate.model.run import run
from rose_simulate.model.scenarios.costs import costs_of
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario
from rose_simulate.model.scenarios.scenario import Load, Regime, RolloutJob, Scenario
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.pages.study_page import page
from rose_simulate.runs import fleets
from rose_simulate.runs.fleets import FleetResult, against, fleet_table, run_fleet, won

FLEET = Path(__file__).parents[2] / "simulate" / "scenarios" / "fleet.yaml"


@pytest.fixture(scope="module")
def setup() -> FleetScenario:
    found = read_scenario(FLEET)
    assert isinstance(found, FleetScenario)
    return found


@pytest.fixture(scope="module")
def material(setup: FleetScenario) -> SimulationInputs:
    return read_material(FLEET, setup)


def small(setup: FleetScenario, **changes: object) -> FleetScenario:
    """One service of 8 replicas, one job with 4 dedicated and up to 8 borrowed engines."""
    kind = setup.services[0]
    load = kind.service.load.model_copy(update={"requests_per_s": 2.0})
    service = kind.service.model_copy(
        update={"replicas": 8, "load": load, "max_replicas_percent": 100}
    )
    job = setup.jobs.job.model_copy(update={"dedicated": 4, "borrowed": 8, "batch_groups": 8})
    jobs = setup.jobs.model_copy(update={"count": 1, "pools": 1, "job": job})
    plain: dict[str, object] = {
        "services": (kind.model_copy(update={"count": 1, "service": service}),),
        "jobs": jobs,
        "seconds": 600.0,
    }
    return setup.model_copy(update=plain | changes)


def simulated(setup: FleetScenario, material: SimulationInputs, regime: Regime) -> FleetOutcome:
    kind, job = setup.services[0].service, setup.jobs.job
    lender = Lender(kind, job, regime, setup.derate)
    trace = material.traces[kind.load.trace]
    seen = curve(lender, loads=(0.0, 0.25, 1.0), trace=trace, pool=material.episodes)
    fleet = FleetRun(
        setup,
        regime,
        1,
        curves=(seen,),
        dedicated=dedicated_tokens_per_s(job, setup.derate, material.episodes),
        traces=material.traces,
        episodes=material.episodes,
    )
    return fleet.run()


def events(setup: FleetScenario, material: SimulationInputs, regime: Regime) -> float:
    """Useful tokens per second of the same pools, event by event, turns placed."""
    kind = setup.services[0].service
    scenario = Scenario(
        name="same",
        seconds=setup.seconds,
        derate=setup.derate,
        episodes="",
        services=(
            kind.model_copy(update={"load": Load(trace=kind.load.trace, requests_per_s=2.0)}),
        ),
        jobs=(setup.jobs.job,),
    )
    outcome, _ = run(scenario, regime, 1, material, {})
    return outcome.useful_tokens_per_s


def full(setup: FleetScenario, **changes: object) -> FleetScenario:
    """The same with the batch for each dedicated GPU that study ``capacity`` has."""
    here = small(setup, **changes)
    job = here.jobs.job.model_copy(update={"batch_groups": 32})
    return here.model_copy(update={"jobs": here.jobs.model_copy(update={"job": job})})


@pytest.mark.parametrize("regime", [Regime.FIXED, Regime.OURS_LADDER])
def test_the_fleet_agrees_with_single_events(
    setup: FleetScenario, material: SimulationInputs, regime: Regime
) -> None:
    here = small(setup)
    found = simulated(here, material, regime)
    assert found.tokens_per_s == pytest.approx(events(here, material, regime), rel=0.25)


@pytest.mark.parametrize("regime", [Regime.FIXED, Regime.OURS])
def test_the_fleet_agrees_with_single_events_where_engines_are_full(
    setup: FleetScenario, material: SimulationInputs, regime: Regime
) -> None:
    here = full(setup)
    found = simulated(here, material, regime)
    assert found.full_share > 0.95
    assert found.tokens_per_s == pytest.approx(events(here, material, regime), rel=0.15)


def test_a_fleet_says_where_its_engines_lack_trajectories(
    setup: FleetScenario, material: SimulationInputs
) -> None:
    starved, fed = (
        simulated(one, material, Regime.OURS_HELD) for one in (small(setup), full(setup))
    )
    assert starved.full_share < 0.9 * fed.full_share
    assert starved.lent_worth == fed.lent_worth
    assert 0.2 < fed.lent_worth < 1.0


def test_both_readings_of_the_papers_rules_are_one_in_a_fleet_and_only_one_is_run(
    setup: FleetScenario, material: SimulationInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "LOADS", (0.0, 0.4))
    readings = Regime.ROSE_PAPER, Regime.ROSE_PAPER_DEDICATED
    first, second = (
        run_fleet(
            full(setup, regimes=(one,), seeds=(1,), seconds=120.0), material, lambda _one: None
        ).outcomes[0]
        for one in readings
    )
    assert first.tokens_per_s > 0
    assert second == msgspec.structs.replace(first, regime=second.regime)
    both = full(setup, regimes=readings, seeds=(1,), seconds=120.0)
    with pytest.raises(ScenarioError, match="rose-paper-dedicated is rose-paper in a fleet"):
        run_fleet(both, material, lambda _one: None)


def tank(job: RolloutJob, *, by_age: bool = True) -> FluidJob:
    """Every trajectory writes 100 tokens, always at an engine."""
    own = costs_of(job, job.device, job.gpus_per_engine, 0.5)
    work = FluidWork(job, own, np.array([100.0]), 1.0, by_age)
    return FluidJob(work, np.random.default_rng(1))


PLACES = EngineSupply(most=200.0, slots=8, engines=1)


def test_old_trajectories_have_the_places_where_there_are_more(setup: FleetScenario) -> None:
    job = setup.jobs.job.model_copy(update={"group": 4, "batch_groups": 2, "staleness": 3})
    aged, turned = tank(job), tank(job, by_age=False)
    for second in range(4):
        aged.advance(PLACES, float(second), 1.0)
        turned.advance(PLACES, float(second), 1.0)
    assert aged.finished == 8
    assert turned.finished == 0
    assert aged.tokens == turned.tokens == 800


def test_tokens_of_dropped_groups_are_of_no_use(setup: FleetScenario) -> None:
    job = setup.jobs.job.model_copy(
        update={"group": 4, "batch_groups": 2, "staleness": 0, "train_s": 1.0}
    )
    found = tank(job)
    found.advance(PLACES, 0.0, 1.0)
    assert found.useful == found.tokens == 200
    found.version = 1  # published by whoever else trains: what is under way is stale
    for second in range(1, 8):
        found.advance(PLACES, float(second), 1.0)
    assert found.dropped == 8
    assert found.discarded == 800
    assert found.useful == found.tokens - 800


def test_same_seed_same_bytes_and_lending_helps(
    setup: FleetScenario, material: SimulationInputs
) -> None:
    here = small(setup)
    ours, fixed = (simulated(here, material, one) for one in (Regime.OURS, Regime.FIXED))
    again = simulated(here, material, Regime.OURS)
    assert msgspec.json.encode(ours) == msgspec.json.encode(again)
    assert ours.gpus == 12
    assert ours.tokens_per_s > fixed.tokens_per_s
    assert fixed.lent_share == 0
    assert 0 < ours.open_share < 1
    assert ours.finished >= ours.accepted


def test_the_planner_keeps_the_pools_limit(
    setup: FleetScenario, material: SimulationInputs
) -> None:
    here = small(setup)
    kind = here.services[0]
    half = kind.service.model_copy(update={"max_replicas_percent": 50})
    limited = here.model_copy(update={"services": (kind.model_copy(update={"service": half}),)})
    assert simulated(limited, material, Regime.OURS).lent_share <= 0.5


def test_a_lease_of_a_fleet_holds_what_its_turns_need(
    setup: FleetScenario, material: SimulationInputs
) -> None:
    held, ours = (simulated(small(setup), material, one) for one in (Regime.OURS_HELD, Regime.OURS))
    assert ours.lent_hours < held.lent_hours
    assert held.lent_hours == pytest.approx(8 * 600 / 3600, rel=0.1)
    assert ours.tokens_per_s > 0.8 * held.tokens_per_s


def test_violations_of_serving_alone_are_told_apart(
    setup: FleetScenario, material: SimulationInputs
) -> None:
    """At the load of a burst some requests are late by themselves, whatever is lent."""
    kind = setup.services[1]
    trace = material.traces[kind.service.load.trace]

    def seen(regime: Regime) -> Curve:
        lender = Lender(kind.service, setup.jobs.job, regime, setup.derate)
        return curve(lender, loads=(0.0, 12.8), trace=trace, pool=material.episodes)

    fixed, bound = seen(Regime.FIXED), seen(Regime.CLAIRVOYANT)
    assert fixed.late_alone == bound.late_alone
    assert fixed.late_alone[1] > 0.1
    assert not any((*fixed.late_added, *bound.late_added, *fixed.tokens_per_s))
    assert bound.tokens_per_s[0] > 100


def test_what_a_replica_does_alone_is_the_same_under_every_regime(
    setup: FleetScenario, material: SimulationInputs
) -> None:
    kind = setup.services[1]
    trace = material.traces[kind.service.load.trace]
    fixed = Lender(kind.service, setup.jobs.job, Regime.FIXED, setup.derate)
    ours = replace(fixed, regime=Regime.OURS)
    known = by_itself(ours, loads=(0.8,), trace=trace)
    assert known == by_itself(fixed, loads=(0.8,), trace=trace)
    found = curve(ours, loads=(0.8,), trace=trace, pool=material.episodes, alone=known)
    assert found == curve(ours, loads=(0.8,), trace=trace, pool=material.episodes)


def test_what_is_added_inside_the_slo_and_what_is_spared_are_told_apart(
    setup: FleetScenario, material: SimulationInputs
) -> None:
    """Above a hundredth of 12.8 x 2 requests per second serving alone misses its SLO here."""
    flat = 900.0, 900.0
    seen = Curve((0.0, 12.8), flat, (1.0, 1.0), (0.0, 0.5), (0.02, 0.02), (0.01, 0.01))
    here = small(setup)
    fleet = FleetRun(
        here,
        Regime.OURS,
        1,
        curves=(seen,),
        dedicated=900.0,
        traces=material.traces,
        episodes=material.episodes,
    )
    found = fleet.run()
    assert found.added_violations == pytest.approx(2 * found.spared_violations)
    assert 0 < found.added_inside < found.added_violations
    assert found.derate == here.derate


def test_every_derate_and_seed_is_run_and_paired(
    setup: FleetScenario, material: SimulationInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "LOADS", (0.0, 0.4))
    here = small(setup, seeds=(1, 2), seconds=60.0, regimes=(Regime.FIXED, Regime.ROSE_PAPER))
    found = run_fleet(here, material, lambda _one: None, (0.4, 0.7))
    ran = [(one.derate, one.regime, one.seed) for one in found.outcomes]
    assert ran == [
        (derate, regime, seed)
        for derate in (0.4, 0.7)
        for regime in ("fixed", "rose-paper")
        for seed in (1, 2)
    ]
    paper = next(one for one in found.outcomes if one.regime == "rose-paper")
    ratio = against(found, paper, Regime.FIXED)
    assert ratio is not None
    assert ratio.low is not None
    assert against(found, paper, Regime.ROSE_PAPER) is None
    text = page("x", "(x)", "Says.", (found,)).text
    assert "| 0.4 | 2 | `rose-paper` |" in text
    assert f"{ratio.mean:.2f} [{ratio.low:.2f}, " in text


def outcome(regime: Regime, seed: int, tokens_per_s: float, added: float) -> FleetOutcome:
    """An hour of a hundred dedicated GPUs."""
    return FleetOutcome(
        regime=regime.value,
        seed=seed,
        gpus=500,
        seconds=3600.0,
        tokens_per_s=tokens_per_s,
        finished=0,
        accepted=0,
        dropped=0,
        steps=0,
        requests=9000,
        violations_alone=2.0,
        added_violations=added,
        lent_share=0.5,
        open_share=0.5,
        derate=0.5,
        dedicated_gpus=100,
    )


def test_the_shadow_price_of_a_violation_stands_in_a_fleets_table_and_page() -> None:
    found = FleetResult(
        "fleet",
        (
            outcome(Regime.FIXED, 1, 1000.0, 0.0),
            outcome(Regime.FIXED, 2, 1000.0, 0.0),
            outcome(Regime.ROSE_PAPER, 1, 1500.0, 2500.0),
            outcome(Regime.ROSE_PAPER, 2, 1500.0, 2500.0),
            outcome(Regime.OURS, 1, 1200.0, 0.0),
            outcome(Regime.OURS, 2, 1600.0, 20.0),
        ),
    )
    # Half as many tokens more than a hundred GPUs give in an hour, for 2,500 late requests.
    assert won(found, found.outcomes[2:3]) == pytest.approx((50.0, 0.02))
    assert won(found, found.outcomes[4:]) == pytest.approx((80.0, 4.0))
    assert won(found, found.outcomes[:2]) is None
    lines = [line.split("  ")[-1].strip() for line in fleet_table(found).splitlines()]
    listed = ["-", "-", "50.0, 0.02", "50.0, 0.02", "20.0, none late", "60.0, 3.00"]
    assert lines == ["GPU-h won, per violation", *listed]
    text = page("fleet", "(h)", "Says.", (found,)).text
    assert "violations alone | GPU-hours won | per violation |" in text
    for cells in ("| 2 of 9000 |  |  |", "| 2 of 9000 | 100 | 0.02 |", "| 2 of 9000 | 80 | 4.00 |"):
        assert cells in text
    without = FleetResult("fleet", found.outcomes[2:])
    assert won(without, without.outcomes[2:]) is None


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("pools: 2", "pools: 60", "jobs.pools: a lease of 60 pools, but 50 services"),
        ("tpot_ms: 150", "tpot_ms: 5", "services.0.service.tpot_ms: is not above"),
        ("borrowed: 100", "borrowed: 900", "jobs.job.borrowed: borrows 900 replicas"),
        ("staleness: 1", "awaits_weights: true", "jobs.job.awaits_weights: a fleet's bins"),
        ("load: {", "load: {prompt_spread: 0.1, ", "services.0.service.load: a fleet does not"),
    ],
)
def test_impossible_fleets_are_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.read_text().replace(old, new, 1))
    with pytest.raises(Impossible) as caught:
        read_scenario(path)
    assert reason in str(caught.value)
