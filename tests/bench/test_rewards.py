"""Workers that follow the wish, and pools of a fixed size, on virtual time."""

import pytest

from bench.rewards import steps
from bench.rewards.scaling import fixed, followed, lengths, smallest
from bench.rewards.steps import compared, usual
from rose_simulate.model.jobs.job import JobCounts, StepParts

BURST = [0.0] * 40 + [600.0] * 40
TAKES = [10.0] * 80


def test_a_fixed_pool_stands_idle_between_bursts() -> None:
    pool = fixed(BURST, TAKES, 40)
    assert pool.wait_p99_s == 0.0
    assert pool.busy_share == pytest.approx(800 / (40 * 610))


def test_a_pool_that_follows_the_wish_is_gone_between_bursts() -> None:
    ours = followed(BURST, TAKES, target_s=20.0, cold_s=3.0, most=64)
    # 40 rewards of 10 s within 20 s take 20 workers, and more once their cold start has passed.
    assert 20 < ours.most <= 40
    assert ours.busy_share > 5 * fixed(BURST, TAKES, 40).busy_share
    # The promise runs from when a reward was taken: none waits beyond it as the queue shrinks.
    assert 3.0 <= ours.wait_p99_s <= 20.0 + 3.0 - 10.0


def test_it_never_has_more_workers_than_it_may() -> None:
    ours = followed(BURST, TAKES, target_s=1.0, cold_s=0.0, most=7)
    assert ours.most == 7
    assert ours.wait_p99_s > 40.0


def test_the_smallest_pool_keeps_the_wait_and_one_less_does_not() -> None:
    takes = lengths(80, 10.0, seed=1)
    pool = smallest(BURST, takes, 20.0)
    assert pool.wait_p99_s <= 20.0 < fixed(BURST, takes, pool.most - 1).wait_p99_s


def test_lengths_are_the_seeds_and_average_out() -> None:
    assert lengths(5, 10.0, 1) == lengths(5, 10.0, 1) != lengths(5, 10.0, 2)
    assert sum(lengths(4000, 10.0, 1)) / 4000 == pytest.approx(10.0, rel=0.1)


def test_a_long_round_more_or_less_is_no_added_time() -> None:
    first, short = StepParts(300.0, 0.0, 60.0), StepParts(100.0, 0.0, 60.0)
    long = StepParts(200.0, 0.0, 60.0, long=True)
    one, two = [first, short, short, short, long], [first, short, short, long, short, long]
    assert compared(one, two).share == pytest.approx(0.0)
    assert usual(one)["rollouts, to their last token"] == pytest.approx(0.8 * 100 + 0.2 * 200)
    held = [StepParts(part.rollout_s, 10.0, part.train_s, part.long) for part in two]
    assert compared(one, held).parts["the last reward"] == pytest.approx(10.0)
    assert usual([first])["training after it"] == 60.0


def test_each_trainer_is_shown_beside_the_whole_batch_and_its_own_kind_with_the_same_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    takes = {"whole": 130.0, "streams": 90.0, "streams, one late": 80.0}

    def played(trainer: str, _seconds: float, seed: int, reward_s: float) -> JobCounts:
        shows = 0.2 * reward_s if "late" in trainer else reward_s
        counts = JobCounts()
        counts.step_parts += [StepParts(takes[trainer] + seed, shows, 10.0)] * 3
        return counts

    monkeypatch.setattr(steps, "played", played)
    told = {one.name: one.value for one in steps.figures(1.0, [1, 2], list(takes))}
    late = "streams, one late, rewards of 10 s: "
    assert told[f"{late}a step"] == pytest.approx(93.5)
    assert told[f"{late}the last reward alone, of the step without it"] == pytest.approx(
        (2 / 91 + 2 / 92) / 2
    )
    assert told[f"{late}a step, x whole with them"] == pytest.approx((93 / 151 + 94 / 152) / 2)
    assert told[f"{late}a step, x streams with them"] == pytest.approx((93 / 111 + 94 / 112) / 2)
    assert told[f"{late}the last reward, beyond streams"] == pytest.approx(-8.0)
    assert "streams, rewards of 10 s: a step, x streams with them" not in told
