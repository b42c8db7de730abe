"""What is decided about rewards, without a process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rewards.demand import RewardDemand, Scaling, wished
from rose_core.rewards.groups import GroupProgress
from rose_core.rewards.hedging import RunningReward, hedge, next_late
from rose_core.rewards.limits import LEAST, TimeLimits
from rose_core.rewards.order import RewardQueue, WaitingReward, first
from rose_core.rewards.results import Lost, Masked, Scored, result_of
from rose_core.rewards.scale import promised_age, wish


def test_an_answer_is_a_number_or_says_itself_whether_it_is_correct() -> None:
    assert result_of(0.5, 1.0, 2.0) == Scored(0.5, False, 2.0)
    assert result_of(True, 1.0, 2.0) == Scored(1.0, True, 2.0)
    assert result_of({"reward": 0.1, "correct": True}, 1.0, 2.0) == Scored(0.1, True, 2.0)


@pytest.mark.parametrize(
    "reported",
    [
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        "1",
        [],
        {},
        {"reward": None},
        {"reward": 1, "correct": "yes"},
    ],
)
def test_what_is_no_number_is_lost_and_never_zero(reported: object) -> None:
    assert isinstance(result_of(reported, 1.0, 0.0), Lost)


def test_no_verdict_is_masked() -> None:
    assert isinstance(result_of(None, 1.0, 0.0), Masked)


def test_the_wish_is_queue_times_median_over_target() -> None:
    assert wish([0.0] * 100, 0.5, 5.0, 64) == 10
    assert wish([], 0.5, 5.0, 64) == 0
    assert wish([0.0] * 7, None, 5.0, 64) == 1
    assert wish([0.0] * 100, 60.0, 1.0, 64) == 64


def test_a_burst_keeps_its_workers_until_it_is_done() -> None:
    """Ten workers were promised for five seconds: half of the queue has half of them left."""
    for done in range(0, 100, 10):
        age = done / 10 * 0.5
        assert wish([age] * (100 - done), 0.5, 5.0, 64) == 10, done


def test_what_comes_later_does_not_move_the_end_of_what_came_before() -> None:
    assert wish([4.0] * 10, 0.5, 5.0, 64) == 5
    assert wish([4.0] * 10 + [0.0] * 10, 0.5, 5.0, 64) == 5
    assert wish([60.0] * 3, 0.5, 5.0, 64) == 3


def test_a_reward_that_runs_counts_for_what_is_left_of_it() -> None:
    assert wish([0.0], 10.0, 10.0, 64, [0.0] * 10) == 11
    assert wish([0.0], 10.0, 10.0, 64, [9.0] * 10) == 2, "they end, and leave one to do"
    assert wish([0.0] * 4, 10.0, 10.0, 64, [5.0] * 4) == 6, "sixty seconds of work within ten"
    assert wish([0.0] * 4, 10.0, 10.0, 64, []) == 4


def test_once_one_has_nothing_to_do_all_go_unless_rewards_come_before_new_ones_are_ready() -> None:
    assert wish([], 10.0, 10.0, 64, [0.0] * 10) == 10, "each of them works"
    assert wish([], 10.0, 10.0, 64, [9.0] * 10) == 1, "they end, and leave nothing to do"
    assert wish([], 10.0, 10.0, 64, [0.0] * 10, idle=1) == 0, "they finish what they have, and go"
    assert wish([], 10.0, 10.0, 64, [0.0] * 10, idle=1, expected=0.4) == 0
    assert wish([], 10.0, 10.0, 64, [0.0] * 10, idle=1, expected=0.5) == 10
    assert wish([], 10.0, 10.0, 64, [0.0] * 10, idle=4, expected=0.5) == 0, "four would be idle"
    assert wish([], 10.0, 10.0, 64, [], idle=1, expected=0.5) == 1
    assert wish([], 10.0, 10.0, 64, [], expected=9.0) == 0, "none is started for what may come"
    assert wish([0.0], 10.0, 10.0, 64, [], idle=3) == 1


def test_rewards_are_expected_of_groups_that_lack_members() -> None:
    demand, shape = RewardDemand(), GroupProgress(members=8)
    for number in range(4):  # in each the first seven come within six seconds, and one a minute on
        start, group = 1000.0 * number, shape
        for after in (0, 1, 2, 3, 4, 5, 6, 66):
            group = group.taking(start + after)
            demand.note_taken(start + after, number, group)
    assert demand.expected(4000.0, 1.5) == 0.0, "every group has all"
    now, group = 4000.0, shape.taking(4000.0)
    demand.note_taken(now, "open", group)
    assert demand.expected(now, 1.5) == pytest.approx(1.0), "one of seven comes in that time"
    assert demand.expected(now + 30.0, 1.5) == 0.0, "the last comes later"
    for after in (1, 2, 3, 4, 5, 6, 7):
        group = group.taking(now + after)
        demand.note_taken(now + after, "open", group)
    assert group.to_come == 0
    assert not demand._open, "a group that has all is forgotten"


def test_a_lost_reward_is_expected_again() -> None:
    group = GroupProgress(members=2).taking(1.0).taking(2.0)
    assert group.to_come == 0
    assert group.after(Lost("")).to_come == 1


def test_rewards_that_follow_each_other_closely_keep_their_worker_without_a_group() -> None:
    demand = RewardDemand()
    for number in range(20):
        demand.note_taken(float(number), None)
    demand.times.extend([0.1] * 9)
    scaling = Scaling(target_s=10.0, patience_s=0.0, cold_start_s=1.5, most=64)
    assert wished([demand], scaling, 19.1, [], [], idle=1) == 1
    assert wished([demand], scaling, 40.0, [], [], idle=1) == 0, "no gap has been as long"
    other = RewardDemand()
    assert wished([other], scaling, 19.1, [], [], idle=1) == 0, "another team's are not known"


def test_what_has_run_far_beyond_the_median_keeps_its_worker_from_what_waits() -> None:
    assert wish([0.0] * 8, 1.0, 10.0, 64, [30.0] * 20) == 21, "twenty do not come back in time"
    assert wish([0.0] * 8, 1.0, 10.0, 64, [1.5] * 20) == 1, "these do"
    assert wish([0.0] * 8, 1.0, 10.0, 16, [30.0] * 20) == 16
    assert wish([], 1.0, 10.0, 64, [30.0] * 20) == 1, "nothing waits for them"


def test_a_fraction_of_a_worker_brings_none_while_others_can_do_it() -> None:
    assert wish([0.0] * 7, 1.0, 5.0, 64) == 1, "seven seconds within five are 1.4 workers"
    assert wish([0.0] * 8, 1.0, 5.0, 64) == 2


def test_a_reward_whose_group_lacks_others_may_take_longer_until_it_decides_its_group() -> None:
    def ages(taken: float, complete: float | None) -> list[float]:
        return [promised_age(taken, complete, 15.0)] * 10

    assert wish(ages(0.0, None), 1.0, 10.0, 64) == wish([0.0] * 10, 1.0, 25.0, 64) == 1
    assert wish(ages(20.0, None), 1.0, 10.0, 64) == 2, "ten within the five seconds that are left"
    assert wish(ages(0.0, math.inf), 1.0, 10.0, 64) == wish([0.0] * 10, 1.0, 10.0, 64) == 1
    assert wish(ages(12.0, 5.0), 1.0, 10.0, 64) == 2, "the target counts from when it decides"
    assert promised_age(22.0, 2.0, 15.0) == 7.0, "and what was promised before is kept"


def test_a_group_is_complete_once_no_other_reward_can_be_needed_to_decide_it() -> None:
    good = Scored(1.0, True, 1.0)
    group = GroupProgress(members=4, keep=3).taking(1.0)
    assert group.complete is None
    group = group.after(good).taking(2.0)
    assert group.complete is None, "two of the three that are kept are there or come"
    group = group.taking(3.0)
    assert group.complete == 3.0
    assert group.taking(4.0).complete == 3.0
    assert group.after(good).complete == 3.0
    assert group.after(good).after(good).complete is None, "it is decided"
    assert group.after(Masked("", 1.0)).complete is None, "one more is needed in its place"
    assert group.after(Lost("")).taking(5.0).complete == 5.0, "a lost one is taken anew"


@given(
    ages=st.lists(st.floats(0.0, 1e4), min_size=1, max_size=200),
    p50=st.floats(0.0, 1e4),
    target=st.floats(0.01, 1e3),
    more=st.floats(0.0, 1e4),
    running=st.lists(st.floats(0.0, 1e4), max_size=50),
)
def test_a_queue_wishes_for_somebody_and_never_for_more_than_it_has(
    ages: list[float], p50: float, target: float, more: float, running: list[float]
) -> None:
    wanted = wish(ages, p50, target, 64, running)
    assert 1 <= wanted <= min(len(ages) + len(running), 64)
    assert wanted <= wish([*ages, more], p50, target, 64, running)
    assert wanted <= wish([age + more for age in ages], p50, target, 64, running)
    assert wanted <= wish(ages, p50, target, 64, [*running, more])


def test_a_limit_is_learned_from_correct_answers_of_the_same_task_alone() -> None:
    limits = TimeLimits()
    for number in range(LEAST):
        assert limits.limit("f", "short", 60.0) == 60.0
        limits.learn("f", "short", 1.0 + number / 10)
    assert limits.limit("f", "short", 60.0) == pytest.approx(2 * (1.0 + (LEAST - 1) / 10))
    assert limits.limit("f", "other", 60.0) == 60.0
    assert limits.limit("f", "short", 2.0) == 2.0
    for _ in range(64):
        limits.learn("f", "short", 0.001)
    assert limits.limit("f", "short", 60.0) == 1.0


def test_answers_of_no_task_draw_no_limit() -> None:
    limits = TimeLimits()
    for _ in range(LEAST):
        limits.learn("f", "", 0.001)
    assert limits.limit("f", "", 60.0) == 60.0


def test_the_member_that_completes_a_group_goes_first() -> None:
    early = WaitingReward(1, left=7)
    last = WaitingReward(3, left=1)
    urgent = WaitingReward(4, left=7, deadline=5.0)
    assert first([early, last, urgent]) is last
    assert first([early, urgent]) is urgent
    assert first([early, WaitingReward(2, left=7)]) is early
    assert first([early, WaitingReward(5)]) == WaitingReward(5)
    assert first([]) is None


def test_a_decided_groups_members_go_last() -> None:
    unneeded = WaitingReward(1, left=0, deadline=0.0)
    assert first([unneeded, WaitingReward(2, left=7)]) == WaitingReward(2, left=7)
    assert first([unneeded]) is unneeded


@given(
    asked=st.lists(
        st.tuples(st.integers(0, 4), st.none() | st.floats(0.0, 9.0)), min_size=1, max_size=40
    ),
    lacks=st.lists(st.none() | st.integers(0, 5), min_size=5, max_size=5),
)
def test_a_queue_takes_them_in_the_order_of_all_that_wait(
    asked: list[tuple[int, float | None]], lacks: list[int | None]
) -> None:
    queue = RewardQueue[int]()
    waiting = {}
    for number, (lane, deadline) in enumerate(asked):
        queue.put(lane, number, deadline)
        waiting[number] = WaitingReward(number, lacks[lane], deadline)
    while waiting:
        startable = {number: one for number, one in waiting.items() if asked[number][0] != 4}
        expected = first(startable.values())
        taken = queue.take(lacks.__getitem__, lambda lane: lane != 4)
        assert taken == (None if expected is None else expected.number)
        if taken is None:
            break
        del waiting[taken]
    assert all(asked[number][0] == 4 for number in waiting)


def test_a_start_compares_groups_and_not_all_that_wait() -> None:
    queue, looked = RewardQueue[int](), list[int]()
    for number in range(4096):
        queue.put(number % 4, number)

    def left(lane: int) -> int:
        looked.append(lane)
        return 9 - lane

    assert queue.take(left, lambda _: True) == 3
    assert len(looked) == 4


def test_a_group_is_decided_by_the_last_it_keeps_or_by_its_last_member() -> None:
    good, no_verdict, gone = Scored(1.0, True, 1.0), Masked("TimedOut", 1.0), Lost("away")
    whole = GroupProgress(members=3)
    assert [whole.left, whole.after(good).left, whole.after(good).after(no_verdict).left] == [
        3,
        2,
        1,
    ]
    assert whole.after(gone) == whole, "it is tried anew"
    some = GroupProgress(members=4, keep=2).after(good)
    assert some.left == 1
    assert some.after(no_verdict).left == 1, "what is masked is none of those that are kept"
    assert some.after(good).left == 0
    assert not some.after(good).ended, "its other members still come"
    short = some.after(no_verdict).after(no_verdict)
    assert (short.left, short.after(no_verdict).left, short.after(no_verdict).ended) == (1, 0, True)


def test_what_is_late_and_decides_its_group_is_hedged_once_the_latest_first() -> None:
    late = RunningReward(1, age=5.0, late_after=4.0, group=("a", "g"), left=1)
    later = RunningReward(2, age=9.0, late_after=4.0)
    others = [
        RunningReward(3, age=90.0, late_after=4.0, group=("a", "other"), left=2),
        RunningReward(4, age=90.0, late_after=None),
        RunningReward(5, age=90.0, late_after=4.0, hedged=True),
        RunningReward(6, age=90.0, late_after=4.0, free=False),
        RunningReward(7, age=90.0, late_after=4.0, group=("a", "decided"), left=0),
    ]
    assert hedge([late, later, *others]) is later
    assert hedge([late, *others]) is late
    assert hedge(others) is None
    assert next_late([late, *others]) is None


def test_late_ones_that_decide_their_group_together_are_both_hedged() -> None:
    one, other = (
        RunningReward(n, age=5.0 + n, late_after=4.0, group=("a", "g"), left=2) for n in range(2)
    )
    assert hedge([one]) is None, "the other is in time, and hides it"
    assert hedge([one, other]) is other
    assert hedge([one, replace(other, hedged=True)]) is one
    assert hedge([one, replace(other, group=("b", "g"))]) is None, "another team's group"


def test_the_next_look_is_when_the_next_becomes_late() -> None:
    soon = RunningReward(1, age=1.0, late_after=4.0, group=("a", "g"), left=3)
    assert hedge([soon]) is None
    assert next_late([soon, RunningReward(2, age=0.0, late_after=4.0)]) == 3.0
    assert next_late([replace(soon, left=0)]) is None, "its group is decided"


def test_late_is_what_ninety_five_of_a_hundred_correct_answers_are_not() -> None:
    limits = TimeLimits()
    for number in range(LEAST):
        assert limits.late_after("f", "t") is None
        limits.learn("f", "t", 2.0 + number)
    assert limits.late_after("f", "t") == pytest.approx(2.0 + 0.95 * (LEAST - 1))
    assert limits.late_after("f", "other") is None
    for _ in range(64):
        limits.learn("f", "t", 0.01)
    assert limits.late_after("f", "t") == 1.0, "a second worker takes as long to start"
