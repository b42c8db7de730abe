"""A simulated trainer whose rounds do not wait for their last rewards."""

import pytest

from rose_simulate.model.clock import SECOND
from rose_simulate.model.jobs.job import JobCounts
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenarios.scenario import Regime, RolloutJob
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import MATERIAL, scenario

END_S = 240
REWARD_S = 6.0
ROUNDS = {"surplus": 0.0, "staleness": 0, "batch_groups": 3, "reward_s": REWARD_S}


def played(**changes: object) -> JobCounts:
    plain = scenario(seconds=END_S)
    job = RolloutJob.model_validate(plain.jobs[0].model_dump() | ROUNDS | changes)
    reported = plain.model_copy(update={"jobs": (job,)})
    world = Simulation(reported, RULES[Regime.OURS], 1, MATERIAL)
    world.clock.run(END_S * SECOND)
    return world.jobs["grpo"].counts


@pytest.mark.parametrize("streams", [False, True])
def test_a_late_reward_holds_no_step_up_and_is_trained_on_one_version_late(
    *, streams: bool
) -> None:
    waits, late = (played(late=count, streams=streams) for count in (0, 3))
    held = [part.reward_s for part in waits.step_parts]
    assert all(one == pytest.approx(REWARD_S) for one in held), "the last reward of each round"
    hidden = [part.reward_s for part in late.step_parts]
    # Groups of this small world end within seconds: all of a batch are late.
    assert sum(hidden) < REWARD_S / 4 * len(hidden)
    trained = [fate for fate in late.fates if fate.trained]
    per_step = 3 * 4
    assert len(trained) == late.accepted
    begun = late.accepted // per_step
    assert late.steps <= begun <= late.steps + 1, "the last step may be under way"
    assert late.accepted == begun * per_step, "every batch is whole"
    old = [fate for fate in trained if fate.stale]
    assert {fate.stale for fate in old} == {1}
    assert len(old) == (begun - 1) * per_step
    assert {fate.stale for fate in waits.fates} == {0}
    assert late.dropped == 0


def test_a_trainer_that_learns_how_many_may_be_late_waits_less_and_has_fewer_of_them() -> None:
    waits, learned, bound = (played(late=count, batch_groups=4) for count in (0, "learned", 3))
    held, hidden = (
        sum(part.reward_s for part in one.step_parts) / one.steps for one in (waits, learned)
    )
    assert hidden < held
    old = [sum(fate.stale == 1 for fate in one.fates if fate.trained) for one in (learned, bound)]
    assert 0 < old[0] <= old[1]
    assert {fate.stale for fate in learned.fates} == {0, 1}
    quick = played(late="learned", batch_groups=4, reward_s=0.01)
    assert {fate.stale for fate in quick.fates} == {0}


def test_no_episode_is_trained_on_twice() -> None:
    counts = played(late=2, surplus=0.5, member_surplus=0.5)
    trained = [fate.session for fate in counts.fates if fate.trained]
    assert len(trained) == len(set(trained)) > 0
    assert counts.cut > 0


def test_what_is_late_is_a_part_of_a_batch() -> None:
    with pytest.raises(ValueError, match="late: 4 must be at most 3: a batch has 3 groups"):
        played(late=4)
    with pytest.raises(ValueError, match="late: 1 must be at most 0: without surplus"):
        played(late=1, surplus=None)
    with pytest.raises(ValueError, match="late: learned must be at most 0: without surplus"):
        played(late="learned", surplus=None)
