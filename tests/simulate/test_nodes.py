"""Nodes: what stands on one machine goes together and comes back together, the same by seed."""

from functools import cache

import msgspec
import pytest

from rose_core.guard.predictor import CostProfile
from rose_core.wire.routing import EngineKind
from rose_simulate.model.clock import SECOND
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.regimes import RULES
from rose_simulate.model.run import run
from rose_simulate.model.scenarios.machines import Machine, fill
from rose_simulate.model.scenarios.possible import impossible
from rose_simulate.model.scenarios.scenario import Nodes, Regime, Scenario
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import MATERIAL, scenario

# Replicas 0 and 1 stand on node 0, replica 2 on node 1, the dedicated engine on node 2.
PAIRS = Nodes(gpus=2)
OFF = {"kind": "node", "at_s": 30, "seconds": 20}
EVERY = [
    Regime.OURS,
    Regime.POLLED,
    Regime.ROSE_PAPER,
    Regime.ON_OFF,
    Regime.UNGUARDED,
    Regime.SPOT,
]


def losing(target: int, **changes: object) -> Scenario:
    return scenario(nodes=PAIRS, failures=[OFF | {"target": target}], **changes)


def world(setup: Scenario, regime: Regime, until_s: float) -> Simulation:
    made = Simulation(setup, RULES[regime], 1, MATERIAL)
    made.clock.run(round(until_s * SECOND))
    return made


@cache
def outcome(regime: Regime, fail_every_s: float | None, seed: int = 1) -> RunOutcome:
    nodes = Nodes(gpus=2, fail_every_s=fail_every_s, back_s=10)
    return run(scenario(nodes=nodes), regime, seed, MATERIAL, {})[0]


def test_things_fill_nodes_in_order_and_start_a_new_one_where_they_do_not_fit() -> None:
    assert fill([1, 1, 1, 1, 1], 2) == [[0, 1], [2, 3], [4]]
    assert fill([2, 4, 2, 2], 4) == [[0], [1], [2, 3]]
    assert fill([], 8) == []


@pytest.mark.parametrize("regime", EVERY)
def test_replicas_of_a_node_serve_nothing_while_it_is_off(regime: Regime) -> None:
    made = world(losing(0), regime, 35)
    there, other = made.replicas[:2], made.replicas[2]
    assert [one.machine.name for one in made.replicas] == ["node-0", "node-0", "node-1"]
    assert not any(one.serving.live or one.device.rollout or one.gate.is_open for one in there)
    assert other.machine.up
    late = [one for one in made.requests["chat"] if 30.0 < one.arrived_ns / SECOND <= 34]
    assert late
    assert {one.replica for one in late} == {2}


@pytest.mark.parametrize("regime", EVERY)
def test_serving_and_rollouts_of_a_node_are_back_together(regime: Regime) -> None:
    made = world(losing(0), regime, 89)
    after = [one for one in made.requests["chat"] if one.arrived_ns > 51 * SECOND]
    assert {one.replica for one in after} & {0, 1}
    assert not made.nodes.down
    if regime is not Regime.SPOT:  # which lends what serving can spare, so perhaps another
        assert any(one.device.rollout for one in made.replicas[:2])


def test_a_request_that_was_under_way_begins_anew_elsewhere_and_has_waited_since_it_came() -> None:
    calm = world(scenario(nodes=PAIRS, seconds=60), Regime.FIXED, 60)
    one = next(r for r in calm.requests["chat"] if r.replica == 0 and r.first_ns > 30 * SECOND)
    middle = (one.first_ns + one.ended_ns) // 2
    off = OFF | {"target": 0, "at_s": middle / SECOND}
    made = world(scenario(nodes=PAIRS, failures=[off], seconds=60), Regime.FIXED, 60)
    same = next(r for r in made.requests["chat"] if r.number == one.number)
    assert same.replica == 2
    assert same.first_ns > middle
    assert same.arrived_ns == one.arrived_ns
    assert made.nodes.restarted >= 1


def test_requests_wait_for_a_node_where_no_replica_is_left() -> None:
    failures = [OFF | {"target": node} for node in (0, 1)]
    made = world(scenario(nodes=PAIRS, failures=failures), Regime.OURS, 45)
    waiting = [one for one in made.requests["chat"] if 31 * SECOND < one.arrived_ns < 45 * SECOND]
    assert waiting
    assert not any(one.first_ns for one in waiting)
    made.clock.run(89 * SECOND)
    assert all(one.first_ns >= 50 * SECOND for one in waiting)


def test_a_dedicated_engine_is_gone_with_its_node_and_comes_back_with_the_newest_weights() -> None:
    made = world(losing(2, jobs=(_quick(),)), Regime.FIXED, 40)
    router, job = made.routers["grpo"], made.jobs["grpo"]
    assert not router.engines
    made.clock.run(51 * SECOND)
    (engine,) = router.engines.values()
    assert engine.kind is EngineKind.DEDICATED
    assert engine.version == job.version
    made.clock.run(89 * SECOND)
    assert job.counts.started == job.counts.finished + job.inside


def _quick() -> object:
    return scenario().jobs[0].model_copy(update={"batch_groups": 1, "train_s": 1})


def test_the_planner_takes_back_what_a_silent_node_held_by_productions_patience() -> None:
    long = OFF | {"seconds": 200, "target": 0}
    made = Simulation(
        scenario(nodes=PAIRS, failures=[long], seconds=300), RULES[Regime.OURS], 1, MATERIAL
    )
    made.clock.run(40 * SECOND)
    held = [one.gate.granted for one in made.replicas[:2]]
    assert any(held)
    made.clock.run(140 * SECOND)
    assert not any(one.gate.granted for one in made.replicas[:2])


def test_replicas_of_a_node_learn_together_until_it_is_booted() -> None:
    made = world(scenario(nodes=PAIRS), Regime.OURS, 30)
    pools = {id(one.machine): one.machine for one in made.replicas}
    assert len(pools) == 2
    machine = Machine("one")
    pool = machine.pool("chat", CostProfile())
    assert machine.pool("chat", CostProfile()) is pool
    machine.boot()
    assert machine.pool("chat", CostProfile()) is not pool


def test_drawn_failures_are_the_same_by_seed_under_every_regime() -> None:
    ours, fixed = outcome(Regime.OURS, 40.0), outcome(Regime.FIXED, 40.0)
    assert ours.node_failures == fixed.node_failures > 0
    again = run(
        scenario(nodes=Nodes(gpus=2, fail_every_s=40.0, back_s=10)), Regime.OURS, 1, MATERIAL, {}
    )[0]
    assert msgspec.json.encode(again) == msgspec.json.encode(ours)
    assert outcome(Regime.OURS, None).node_failures == 0
    counts = {outcome(Regime.FIXED, 40.0, seed).node_failures for seed in range(1, 6)}
    assert len(counts) > 1


def test_impossible_nodes_are_refused() -> None:
    reported = losing(3)
    assert [reason for _, reason in impossible(reported)] == ["there are 3 nodes, counted from 0"]
    wide = scenario().services[0].model_copy(update={"gpus_per_replica": 4})
    narrow = scenario(nodes=PAIRS).model_copy(update={"services": (wide,)})
    found = dict(impossible(narrow))
    assert found["services", 0, "gpus_per_replica"] == "a node has 2 GPUs"
