"""Several services and several jobs at once: who borrows what, and whose bursts coincide."""

from collections import Counter

import pytest

from rose_simulate.model.clock import SECOND
from rose_simulate.model.regimes import RULES
from rose_simulate.model.run import run
from rose_simulate.model.scenarios.scenario import Load, Regime, Scenario
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import MATERIAL, scenario

END_S = 60


def many() -> Scenario:
    """Two jobs that borrow from one service, and one that borrows from another."""
    plain = scenario(seconds=END_S)
    chat, grpo = plain.services[0], plain.jobs[0]
    bursts = Load(burst_every_s=20, burst_size=4, burst_prompt=800, offset_s=10)
    code = chat.model_copy(update={"name": "code", "replicas": 2, "load": bursts})
    jobs = tuple(
        grpo.model_copy(update={"name": name, "borrowed": borrowed, "borrows_from": lender})
        for name, borrowed, lender in (("one", 2, "chat"), ("two", 1, "chat"), ("three", 1, "code"))
    )
    return plain.model_copy(update={"services": (chat, code), "jobs": jobs})


@pytest.mark.parametrize("regime", [Regime.OURS, Regime.ROSE_PAPER])
def test_jobs_borrow_from_their_own_lender_and_no_more_than_they_may(regime: Regime) -> None:
    reported = many()
    world = Simulation(reported, RULES[regime], 1, MATERIAL)
    most: Counter[str] = Counter()
    for second in range(1, END_S):
        world.clock.run(second * SECOND)
        held = Counter(one.job.name for one in world.replicas if one.job and one.gate.granted)
        most |= held
        for one in world.replicas:
            if one.job is not None:
                assert one.job.borrows_from == one.service.name
    assert most == {job.name: job.borrowed for job in reported.jobs}


def test_every_job_gets_tokens_from_what_it_borrowed() -> None:
    outcome, _ = run(many(), Regime.OURS, 1, MATERIAL, {})
    assert [one.name for one in outcome.jobs] == ["one", "two", "three"]
    assert all(one.borrowed_tokens > 0 for one in outcome.jobs)
    assert all(one.requests > 0 for one in outcome.services)


def test_services_burst_in_the_same_second_where_they_are_told_to_and_else_not() -> None:
    reported = many()
    chat, code = reported.services
    hit = chat.model_copy(update={"load": code.load})
    together = world_of(reported.model_copy(update={"services": (hit, code)}))
    assert seconds(together, "chat") == seconds(together, "code")
    twin = chat.model_copy(update={"name": "code", "replicas": 2})
    apart = world_of(reported.model_copy(update={"services": (chat, twin)}))
    chats, codes = ({one.arrived_ns for one in apart.requests[name]} for name in ("chat", "code"))
    assert not chats & codes


def world_of(setup: Scenario) -> Simulation:
    return Simulation(setup, RULES[Regime.FIXED], 1, MATERIAL)


def seconds(world: Simulation, service: str) -> set[int]:
    """In which seconds a service is asked anything."""
    return {one.arrived_ns // SECOND for one in world.requests[service]}
