"""Workers that follow the wish, and pools of a fixed size, on virtual time."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from bench.rewards import scaling, steps
from bench.rewards.__main__ import main as flagged
from bench.rewards.scaling import CHART, Autoscaler, FollowingPool, fixed, lengths, smallest
from bench.rewards.steps import compared, usual
from rose_core.rewards.groups import GroupProgress
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.jobs.job import JobCounts, StepParts

VALUES = Path(__file__).parents[2] / "helm" / "rose" / "values.yaml"
BURST = [0.0] * 40 + [600.0] * 40
TAKES = [10.0] * 80


def test_the_charts_setting_is_the_charts() -> None:
    values = yaml.safe_load(VALUES.read_text())["rewards"]
    names = ("targetSeconds", "patienceSeconds", "coldStartSeconds")
    reported = (*(values[name] for name in names), values["keda"]["cooldownSeconds"])
    assert reported == (CHART.target_s, CHART.patience_s, CHART.cold_s, CHART.cooldown_s)
    assert CHART.poll_s == 15.0, "test_rewards of the chart says so"
    assert values["worker"]["most"] == CHART.most


def test_a_fixed_pool_stands_idle_between_bursts() -> None:
    pool = fixed(BURST, TAKES, 40)
    assert pool.wait_p99_s == 0.0
    assert pool.busy_share == pytest.approx(800 / (40 * 610))


def followed(scaler: Autoscaler, shape: GroupProgress) -> tuple[FollowingPool, int]:
    """The burst, each reward of a group of its own that was begun so; how many results came."""
    clock, came = VirtualClock(), list[float]()
    takes = iter(TAKES)
    pool = FollowingPool(clock, scaler, lambda: next(takes))

    def take(number: int) -> None:
        pool.verify(str(number), shape, lambda: came.append(clock.now_s))

    for number, end in enumerate(BURST):
        clock.at(round(end * SECOND), partial(take, number))
    pool.start()
    clock.run(1200 * SECOND)
    return pool, len(came)


ALONE = GroupProgress(members=1)


def test_a_pool_that_follows_the_wish_is_gone_between_bursts() -> None:
    pool, came = followed(Autoscaler(), ALONE)
    ours = pool.found()
    assert came == 80
    assert 20 < ours.most <= 40
    assert ours.busy_share > 5 * fixed(BURST, TAKES, 40).busy_share
    assert ours.wait_p99_s <= 15.0 + 3.0 + 10.0, "one look, a cold start, and one that was first"


def test_it_never_has_more_workers_than_it_may() -> None:
    pool, came = followed(Autoscaler(most=7), ALONE)
    assert (pool.found().most, came) == (7, 80)
    assert pool.found().wait_p99_s > 40.0


def test_rewards_whose_groups_lack_others_hold_fewer_workers_and_wait_longer() -> None:
    patient = Autoscaler(patience_s=60.0)
    alone, to_come = (
        followed(patient, shape)[0].found() for shape in (ALONE, GroupProgress(members=2))
    )
    assert to_come.most < alone.most / 2
    assert to_come.wait_p99_s > alone.wait_p99_s
    assert to_come.busy_share > alone.busy_share


def test_a_worker_with_nothing_more_to_do_is_let_go_while_it_is_busy() -> None:
    """Told to go at the look at 30 s, it ends at 35 s, and is not idle until the look at 45 s."""
    clock = VirtualClock()
    pool = FollowingPool(clock, replace(Autoscaler(), cold_s=0.01, cold_p99_s=0.01), lambda: 20.0)
    pool._demand.times.append(20.0)
    for number in range(8):
        end = partial(pool.verify, str(number), ALONE, lambda: None)
        clock.at(round((0.0 if number == 0 else 9.0) * SECOND), end)
    pool.start()
    clock.run(45 * SECOND)
    found = pool.found()
    assert found.most > 4
    assert found.busy_share > 0.9


def test_nobody_comes_for_what_workers_that_go_still_finish() -> None:
    """The second has nothing to do from 36.5 s on and both are told to go; the first ends later."""
    clock, takes = VirtualClock(), iter((60.0, 20.0))
    pool = FollowingPool(clock, replace(Autoscaler(), cold_p99_s=1.5), lambda: next(takes))
    pool._demand.times.append(20.0)
    for number in range(2):
        pool.verify(str(number), ALONE, lambda: None)
    pool.start()
    clock.run(120 * SECOND)
    assert len(pool.latencies) == pool.found().starts == 2


def test_a_worker_of_several_places_is_held_until_the_last_of_them_is_done() -> None:
    clock, takes = VirtualClock(), iter((10.0, 30.0))
    pool = FollowingPool(
        clock, replace(Autoscaler(), cold_s=0.01, cold_p99_s=0.01, places=2), lambda: next(takes)
    )
    for number in range(2):
        pool.verify(str(number), ALONE, lambda: None)
    pool.start()
    clock.run(120 * SECOND)
    found = pool.found()
    assert (found.starts, found.most) == (1, 1)
    assert found.busy_share == pytest.approx(40 / 60, rel=0.02)


def test_nobody_is_held_once_the_cool_down_is_over() -> None:
    pool, _ = followed(Autoscaler(), ALONE)
    before = pool.found()
    pool.clock.run(9000 * SECOND)
    assert pool.found() == before


def test_only_settings_that_were_asked_for_are_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.figures(60.0, [1], settings=()) == []
    for flag, others in (("--settings", "streams"), ("--trainers", "2 places")):
        for name in ("three places", others):
            with pytest.raises(SystemExit):
                flagged([flag, name])
            assert f"{flag} knows no {name!r}; it takes " in capsys.readouterr().err


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
    found = {one.name: one.value for one in steps.figures(1.0, [1, 2], list(takes))}
    late = "streams, one late, rewards of 10 s: "
    assert found[f"{late}a step"] == pytest.approx(93.5)
    assert found[f"{late}the last reward alone, of the step without it"] == pytest.approx(
        (2 / 91 + 2 / 92) / 2
    )
    assert found[f"{late}a step, x whole with them"] == pytest.approx((93 / 151 + 94 / 152) / 2)
    assert found[f"{late}a step, x streams with them"] == pytest.approx((93 / 111 + 94 / 112) / 2)
    assert found[f"{late}the last reward, beyond streams"] == pytest.approx(-8.0)
    assert "streams, rewards of 10 s: a step, x streams with them" not in found
