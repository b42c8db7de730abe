"""Where the time of a step went: what is counted, held against steps whose parts are known."""

from functools import cache

import pytest

from bench.rollouts import spent
from bench.rollouts.__main__ import FOLDER
from bench.rollouts.steps import POLICIES, simulate
from bench.scenarios import scenario

_STEPS = 2


@cache
def _taken_apart(
    policy: str, *, dedicated: int, borrowed: int, groups: int, members: int
) -> tuple[spent.Step, ...]:
    """Steps of a job of such a size."""
    setup, material = scenario("step", FOLDER)
    size = {"group": members, "batch_groups": groups}
    engines = {"dedicated": dedicated, "borrowed": borrowed, "dedicated_cap": 4, "cap": 4}
    job = setup.jobs[0].model_copy(update=size | engines)
    service = setup.services[0].model_copy(update={"replicas": 8})
    small = setup.model_copy(update={"jobs": (job,), "services": (service,)})
    found = simulate(small, POLICIES[policy], 7, material, _STEPS)
    return tuple(spent.steps(found.lives, found.makespans[:_STEPS], job.train_s))


def _crowded(policy: str) -> tuple[spent.Step, ...]:
    return _taken_apart(policy, dedicated=1, borrowed=2, groups=3, members=4)


def test_a_trajectory_alone_on_an_engine_takes_its_bound() -> None:
    step = _taken_apart("joint", dedicated=1, borrowed=0, groups=1, members=1)[0]
    assert step.makespan == pytest.approx(step.bound, abs=1e-6)
    assert step.makespan == pytest.approx(step.last.tools + step.last.alone, abs=1e-6)


def test_time_at_a_closed_gate_is_told_from_time_with_neighbours() -> None:
    step = _taken_apart("joint", dedicated=0, borrowed=8, groups=1, members=1)[0]
    assert step.last.shut > 1.0
    assert step.last.neighbours < 0.02 * step.makespan


@pytest.mark.parametrize("policy", ["joint", "rose-paper"])
def test_the_parts_of_the_last_trajectory_add_up_to_the_step(policy: str) -> None:
    for step in _crowded(policy):
        every = [getattr(step.last, part) for part in spent.PARTS]
        assert sum(every) == pytest.approx(step.makespan)
        assert min(every) > -1e-3
        assert step.last.neighbours > 1.0


def test_the_bound_is_the_same_for_every_policy_and_none_is_below_it() -> None:
    ours, theirs = _crowded("joint"), _crowded("rose-paper")
    assert [one.bound for one in ours] == pytest.approx([one.bound for one in theirs])
    assert all(one.bound < one.makespan for one in (*ours, *theirs))
