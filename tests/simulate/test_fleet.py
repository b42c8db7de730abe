"""The fleet model: agrees with single events, keeps limits, repeats itself."""

from pathlib import Path

import msgspec
import pytest

from rose_core.simulate.curves import Curve, Lender, curve, dedicated_tokens_per_s
from rose_core.simulate.errors import Impossible
from rose_core.simulate.fleet import Fleet, FleetOutcome
from rose_core.simulate.fleet_scenario import FleetScenario
from rose_core.simulate.run import run
from rose_core.simulate.scenario import Load, Regime, Scenario
from rose_core.simulate.world import Material
from rose_simulate.reading import read_material, read_scenario

FLEET = Path(__file__).parents[2] / "simulate" / "scenarios" / "fleet.yaml"


@pytest.fixture(scope="module")
def told() -> FleetScenario:
    found = read_scenario(FLEET)
    assert isinstance(found, FleetScenario)
    return found


@pytest.fixture(scope="module")
def material(told: FleetScenario) -> Material:
    return read_material(FLEET, told)


def small(told: FleetScenario, **changes: object) -> FleetScenario:
    """One service of 8 replicas, one job with 4 dedicated and up to 8 borrowed engines."""
    kind = told.services[0]
    load = kind.service.load.model_copy(update={"requests_per_s": 2.0})
    service = kind.service.model_copy(
        update={"replicas": 8, "load": load, "max_replicas_percent": 100}
    )
    job = told.jobs.job.model_copy(update={"dedicated": 4, "borrowed": 8, "batch_groups": 8})
    jobs = told.jobs.model_copy(update={"count": 1, "leases": 1, "job": job})
    plain: dict[str, object] = {
        "services": (kind.model_copy(update={"count": 1, "service": service}),),
        "jobs": jobs,
        "seconds": 600.0,
    }
    return told.model_copy(update=plain | changes)


def simulated(told: FleetScenario, material: Material, regime: Regime) -> FleetOutcome:
    kind, job = told.services[0].service, told.jobs.job
    lender = Lender(kind, job, regime, told.derate)
    trace = material.traces[kind.load.trace]
    seen = curve(lender, loads=(0.0, 0.25, 1.0), trace=trace, pool=material.episodes)
    fleet = Fleet(
        told,
        regime,
        1,
        curves=(seen,),
        dedicated=dedicated_tokens_per_s(job, told.derate, material.episodes),
        traces=material.traces,
        episodes=material.episodes,
    )
    return fleet.run()


def events(told: FleetScenario, material: Material, regime: Regime) -> float:
    """Tokens per second of the same pools, event by event, turns placed for affinity."""
    kind = told.services[0].service
    scenario = Scenario(
        name="same",
        seconds=told.seconds,
        derate=told.derate,
        episodes="",
        services=(
            kind.model_copy(update={"load": Load(trace=kind.load.trace, requests_per_s=2.0)}),
        ),
        jobs=(told.jobs.job,),
    )
    outcome, _ = run(scenario, regime, 1, material, {})
    return sum(job.tokens for job in outcome.jobs) / told.seconds


@pytest.mark.parametrize("regime", [Regime.FIXED, Regime.OURS_LADDER])
def test_the_fleet_agrees_with_single_events(
    told: FleetScenario, material: Material, regime: Regime
) -> None:
    here = small(told)
    found = simulated(here, material, regime)
    assert found.tokens_per_s == pytest.approx(events(here, material, regime), rel=0.25)


def test_same_seed_same_bytes_and_lending_helps(told: FleetScenario, material: Material) -> None:
    here = small(told)
    ours, fixed = (simulated(here, material, one) for one in (Regime.OURS, Regime.FIXED))
    again = simulated(here, material, Regime.OURS)
    assert msgspec.json.encode(ours) == msgspec.json.encode(again)
    assert ours.gpus == 12
    assert ours.tokens_per_s > fixed.tokens_per_s
    assert fixed.lent_share == 0
    assert 0 < ours.open_share < 1
    assert ours.finished >= ours.accepted


def test_the_planner_keeps_the_pools_limit(told: FleetScenario, material: Material) -> None:
    here = small(told)
    kind = here.services[0]
    half = kind.service.model_copy(update={"max_replicas_percent": 50})
    limited = here.model_copy(update={"services": (kind.model_copy(update={"service": half}),)})
    assert simulated(limited, material, Regime.OURS).lent_share <= 0.5


def test_violations_of_serving_alone_are_told_apart(
    told: FleetScenario, material: Material
) -> None:
    """At the load of a burst some requests are late by themselves, whatever is lent."""
    kind = told.services[1]
    trace = material.traces[kind.service.load.trace]

    def seen(regime: Regime) -> Curve:
        lender = Lender(kind.service, told.jobs.job, regime, told.derate)
        return curve(lender, loads=(0.0, 12.8), trace=trace, pool=material.episodes)

    fixed, bound = seen(Regime.FIXED), seen(Regime.CLAIRVOYANT)
    assert fixed.late_alone == bound.late_alone
    assert fixed.late_alone[1] > 0.1
    assert not any((*fixed.late_added, *bound.late_added, *fixed.tokens_per_s))
    assert bound.tokens_per_s[0] > 100


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("leases: 2", "leases: 3", "jobs.leases: 60 leases, but 50 services"),
        ("tpot_ms: 150", "tpot_ms: 5", "services.0.service.tpot_ms: is not above"),
        ("borrowed: 100", "borrowed: 900", "jobs.job.borrowed: jobs borrow 900 replicas"),
    ],
)
def test_impossible_fleets_are_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.read_text().replace(old, new, 1))
    with pytest.raises(Impossible) as caught:
        read_scenario(path)
    assert reason in str(caught.value)
