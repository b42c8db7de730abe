"""Baselines lend as they are said to, and bursts and failures are counted as they happened."""

import itertools

import pytest

import rose_core.rollouts.placement.dispatch
import rose_core.rollouts.placement.residency
import rose_core.rollouts.terms
from rose_simulate.model.regimes import RULES
from rose_simulate.model.routing import router
from rose_simulate.model.run import run
from rose_simulate.model.scenarios.possible import impossible
from rose_simulate.model.scenarios.scenario import Failure, Interference, Load, Regime, Scenario
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import MATERIAL, scenario


def bursty(**changes: object) -> Scenario:
    setup = scenario(seconds=90)
    load = Load(burst_every_s=30, burst_size=12, burst_prompt=3000, offset_s=20)
    service = setup.services[0].model_copy(update={"load": load})
    return setup.model_copy(update={"services": (service,)} | changes)


def test_every_regime_has_rules() -> None:
    assert set(RULES) == set(Regime)


def test_the_queue_and_the_memory_of_trajectories_are_productions() -> None:
    assert vars(router)["next_turn"] is rose_core.rollouts.placement.dispatch.next_turn
    assert vars(router)["Policies"] is rose_core.rollouts.terms.Policies
    assert vars(router)["Residents"] is rose_core.rollouts.placement.residency.Residents


@pytest.mark.parametrize("regime", [Regime.WHOLE_REPLICA, Regime.SPOT])
def test_a_whole_replica_that_is_lent_serves_nobody(regime: Regime) -> None:
    setup = scenario(seconds=240, delays={"start_s": 5.0})
    world = Simulation(setup, RULES[regime], 1, MATERIAL)
    lent = 0
    for second in range(5, 240, 5):
        world.clock.run(second * 10**9)
        engines = [one for one in world.replicas if one.device.rollout is not None]
        lent += len(engines)
        assert all(not one.serving.live for one in engines)
        assert world.replicas[0].service.replicas - len(engines) >= 1
    assert lent


def test_on_off_harvesting_waits_for_idleness_and_ends_at_a_look() -> None:
    world = Simulation(bursty(), RULES[Regime.ON_OFF], 1, MATERIAL)
    world.clock.run(90 * 10**9)
    moves = world.gate_moves
    assert moves
    assert all(time_s == pytest.approx(round(time_s), abs=1e-6) for time_s, _ in moves)


def test_the_time_until_rollouts_are_back_is_told_by_burst() -> None:
    outcome, _ = run(bursty(), Regime.OURS, 1, MATERIAL, {})
    assert len(outcome.recoveries_s) == 3
    assert all(0 < one < 30 for one in outcome.recoveries_s)
    unguarded, _ = run(bursty(), Regime.UNGUARDED, 1, MATERIAL, {})
    assert set(unguarded.recoveries_s) == {0.0}


def test_what_happened_before_the_warm_up_ended_does_not_count() -> None:
    whole, _ = run(scenario(seconds=90), Regime.OURS, 1, MATERIAL, {})
    later, _ = run(scenario(seconds=60, warmup_s=30), Regime.OURS, 1, MATERIAL, {})
    assert later.services[0].requests < whole.services[0].requests
    assert 0 < later.jobs[0].tokens < whole.jobs[0].tokens
    assert later.borrowed_held_ms < whole.borrowed_held_ms


def test_engines_that_are_gone_do_not_come_back_and_no_trajectory_is_lost() -> None:
    gone = tuple(Failure(kind="gone", at_s=30, target=n) for n in range(3))
    world = Simulation(scenario(failures=gone), RULES[Regime.OURS], 1, MATERIAL)
    world.clock.run(25 * 10**9)
    assert any(one.device.rollout for one in world.replicas)
    world.clock.run(90 * 10**9)
    assert not any(one.device.rollout for one in world.replicas)
    job = world.jobs["grpo"]
    assert job.counts.started == job.counts.finished + job.inside


def test_a_failure_may_come_again_and_again() -> None:
    again = (Failure(kind="engine", at_s=20, target=0, every_s=15),)
    world = Simulation(scenario(failures=again), RULES[Regime.OURS], 1, MATERIAL)
    world.clock.run(90 * 10**9)
    closed = [time_s for time_s, change in world.gate_moves if change < 0]
    assert {20, 35, 50, 65, 80} & {round(time_s) for time_s in closed}


def test_every_inconsistent_load_is_refused() -> None:
    setup = scenario()
    loads = (Load(), Load(shape="x", burst_every_s=1), Load(trace="x"))
    for load, number in zip(loads, itertools.count(), strict=False):
        service = setup.services[0].model_copy(update={"load": load})
        found = list(impossible(setup.model_copy(update={"services": (service,)})))
        assert found, number


def test_placement_sees_what_the_guard_of_a_lent_gpu_has_measured() -> None:
    slower = Interference(serving_slowdown=1.15, rollout_slowdown=1.4)
    world = Simulation(scenario(interference=slower), RULES[Regime.OURS], 1, MATERIAL)
    world.clock.run(90 * 10**9)
    measured = {one.name: one.gate.slowdown for one in world.replicas if one.job is not None}
    seen = {one.name: one.slowdown for one in world.routers["grpo"]._sight.engines()}
    assert len(measured) == 2
    assert all(1.0 < slowdown < 2.0 for slowdown in measured.values())
    assert seen == {name: measured.get(name, 0.0) for name in seen}
