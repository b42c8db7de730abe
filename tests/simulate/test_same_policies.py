"""A lease as the pages tell people to write it is simulated with the policies that its router runs.

From the lease's YAML over the operator's command line and the router's flags to the objects that
decide, and, on the other side, from a scenario with the same bound: what comes out must be equal.
"""

from pathlib import Path

import pytest
import yaml

from rose_core.api import RolloutLease
from rose_core.api.rolloutlease import RouterPolicy
from rose_core.rollouts.placement.views import BIASED, PolicyName
from rose_core.rollouts.terms import LeaseTerms, Policies, policies_of
from rose_core.rollouts.trajectories.prospects import Deadline
from rose_operator.apply.routers import deployment
from rose_operator.settings import Settings as OperatorSettings
from rose_router.config import Settings
from rose_router.flags import parser, settings
from rose_router.turns.service import Service
from rose_simulate.model.regimes import RULES
from rose_simulate.model.routing.router import Router
from rose_simulate.model.scenarios.scenario import Placement, Regime
from rose_simulate.model.simulation import Simulation
from tests.router.world import SimClient
from tests.simulate.worlds import MATERIAL, scenario

SAMPLE = Path(__file__).parents[2] / "crds" / "samples" / "rolloutlease.yaml"


def lease(staleness: int, max_age: int | None = None) -> RolloutLease:
    """The sample, with another bound."""
    written = yaml.safe_load(SAMPLE.read_text())
    written["spec"]["weights"]["maxStalenessVersions"] = staleness
    if max_age is not None:
        written["spec"]["router"]["maxAgeVersions"] = max_age
    return RolloutLease.model_validate(written)


def settings_of(reported: RolloutLease) -> Settings:
    """What the router that the operator would start for the lease is started with."""
    platform = OperatorSettings("rose-system", "img", {}, "token", "operator")
    made = deployment(reported, platform)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    words = [word for word in container["args"] if word.startswith("--")]
    own = [word for word in words if not word.startswith(("--token-file", "--turn-token-file"))]
    return settings(parser().parse_args(own))


def in_production(reported: RolloutLease) -> Service:
    """That router."""
    return Service(settings_of(reported), SimClient({}))


def in_the_simulator(staleness: int) -> Router:
    """The router of a simulated job with the bound."""
    setup = scenario(regimes=(Regime.OURS,))
    job = setup.jobs[0].model_copy(update={"staleness": staleness})
    world = Simulation(setup.model_copy(update={"jobs": (job,)}), RULES[Regime.OURS], 1, MATERIAL)
    return world.routers[job.name]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_lease_is_decided_with_what_it_is_simulated_with(staleness: int) -> None:
    production, simulated = in_production(lease(staleness)), in_the_simulator(staleness)
    assert production.policies == simulated.policies
    assert production.prospects.deadline == simulated.prospects.deadline


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_lease_that_names_no_age_has_the_deadline_of_its_staleness(staleness: int) -> None:
    assert in_production(lease(staleness)).prospects.deadline == Deadline(publishes=staleness)


def test_a_lease_that_names_an_age_has_that_deadline() -> None:
    assert in_production(lease(1, max_age=6)).prospects.deadline == Deadline(publishes=6)


def test_a_lease_may_ask_for_every_rule_that_does_not_bias_training_and_for_no_other() -> None:
    offered = {policy.value for policy in RouterPolicy}
    assert offered == {name.value for name in PolicyName} - {name.value for name in BIASED}
    for name in BIASED:
        with pytest.raises(SystemExit):
            parser().parse_args(["--lease=a/b", f"--policy={name.value}"])


@pytest.mark.parametrize("weight", [None, 0.0, 0.5])
def test_the_price_of_a_lent_gpus_time_is_one_in_the_router_and_in_scenarios(
    weight: float | None,
) -> None:
    given = [] if weight is None else [f"--lent-weight={weight}"]
    flags = parser().parse_args(["--lease=a/b", *given])
    written = {} if weight is None else {"lent_weight": weight}
    simulated = Placement.model_validate(written).lent_weight
    assert settings(flags).policies.placement.lent_weight == simulated
    assert weight is None or simulated == weight


def test_rule_and_staleness_are_the_leases_whatever_the_platform_tunes() -> None:
    tuned = policies_of(LeaseTerms(max_staleness=2)).placement
    assert policies_of(LeaseTerms(max_staleness=3), tuned).placement.max_staleness == 3
    assert policies_of(LeaseTerms()) != Policies(), "a lease always has a deadline"
