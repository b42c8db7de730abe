"""Predictor, slack, crossover: numbers that can be checked by hand."""

from __future__ import annotations

import math
import random

import pytest

from rose_core.guard.crossover import (
    SAMPLE_FLOOR,
    Harm,
    Meter,
    Schedule,
    compare,
    floor,
    judge,
)
from rose_core.guard.predictor import CostProfile, Predictor, StopCost
from rose_core.guard.slack import LatencyObjective, duty, measure
from rose_core.telemetry.book import LiveRequest
from tests.guard.costs import most_hits
from tests.guard.worlds import MS, NOW

PROFILE = CostProfile(0.01, 0.05, 0.02, 0.002, shared_prefill=2.0, shared_decode=3.0)


def test_the_profile_alone_and_shared() -> None:
    predictor = Predictor(PROFILE)
    assert predictor.prefill_s(2048, shared=False) == pytest.approx(0.11)
    assert predictor.prefill_s(2048, shared=True) == pytest.approx(0.22)
    assert predictor.decode_s(5, shared=False) == pytest.approx(0.03)
    assert predictor.decode_s(5, shared=True) == pytest.approx(0.09)
    assert predictor.prefill_s(-1, shared=False) > predictor.prefill_s(4096, shared=False)
    assert predictor.slowdown() == pytest.approx(3.0)


def test_it_settles_at_the_quantile_of_what_is_seen() -> None:
    draw = random.Random(1)
    predictor = Predictor(PROFILE, quantile=0.9)
    predicted = []
    seen = []
    for _ in range(4000):
        seconds = 0.2 * math.exp(draw.gauss(0, 0.3))
        predicted.append(predictor.prefill_s(1024, shared=False))
        seen.append(seconds)
        predictor = predictor.learn_prefill(1024, seconds, share=0.0)
    above = sum(s > p for p, s in zip(predicted, seen, strict=True))
    assert 4000 * 0.1 - (most_hits(4000, 0.1) - 4000 * 0.1) <= above <= most_hits(4000, 0.1)
    assert predictor.decode == Predictor(PROFILE).decode, "each phase is learned by itself"


@pytest.mark.parametrize("true_s", [0.0005, 2.0])
def test_a_wrong_profile_is_left_within_a_few_dozen_requests(true_s: float) -> None:
    predictor = Predictor(PROFILE)
    for _ in range(80):
        predictor = predictor.learn_decode(1, true_s, share=1.0)
    assert predictor.decode_s(1, shared=True) == pytest.approx(true_s, rel=0.5)


@pytest.mark.parametrize("true", [1.0, 1.15, 2.0, 3.0])
@pytest.mark.parametrize("profile", [PROFILE, CostProfile()], ids=["of the device", "of another"])
def test_what_co_running_costs_is_learned_from_how_long_rollouts_took_to_stop(
    true: float, profile: CostProfile
) -> None:
    draw = random.Random(4)
    learned = StopCost()
    assert learned.slowdown(2.0) == 2.0, "as believed, until it is measured"
    for _ in range(600):
        size = round(1024 * draw.lognormvariate(0, 1))
        alone = (0.004 + 0.01 * size / 1024) * draw.lognormvariate(0, 0.05)
        stop = draw.choice((0.0, draw.uniform(0.001, 0.010)))
        seconds = alone + stop * (1 - 1 / true)
        usual = profile.prefill_s(size)
        learned = learned.learn(size, seconds, stop, usual, usual)
    assert learned.slowdown(2.0) == pytest.approx(true, rel=0.15)


def test_stops_that_are_short_beside_prompts_leave_what_was_believed() -> None:
    draw = random.Random(4)
    learned = StopCost()
    for _ in range(600):
        alone = 0.3 * draw.lognormvariate(0, 0.2)
        learned = learned.learn(30_000, alone, draw.choice((0.0, 0.004)), 0.3, 0.3)
    assert learned.slowdown(2.0) == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_nonsense_teaches_nothing(seconds: float) -> None:
    predictor = Predictor(PROFILE)
    assert predictor.learn_prefill(10, seconds, share=1.0) == predictor


def test_slack_of_a_queue_adds_the_ones_ahead() -> None:
    goal = LatencyObjective(ttft_s=1.0, tpot_s=0.1, margin=0.2)
    first = LiveRequest(1, NOW - 100 * MS, size=1024)
    second = LiveRequest(2, NOW, size=1024)
    slack = measure((second, first), goal, Predictor(PROFILE), NOW)
    # A prefill alone costs 0.06 s, the step under way 0.066: 0.8 - 0.1 - 0.126 and 0.8 - 0.186.
    assert slack.prefill_s == pytest.approx(0.574)
    assert slack.decode_s is None


def test_decode_slack_is_what_was_earned() -> None:
    goal = LatencyObjective(ttft_s=1.0, tpot_s=0.1, margin=0.0)
    stream = LiveRequest(1, NOW - 3_000 * MS, first_ns=NOW - 2_000 * MS, tokens=30)
    slack = measure((stream,), goal, Predictor(PROFILE), NOW)
    assert slack.decode_s == pytest.approx(30 * 0.1 - 2.0 - 0.066)


def test_the_duty_is_what_a_calculation_by_hand_gives() -> None:
    predictor = Predictor(PROFILE)
    # Three times slower beside a rollout engine, twice as slow allowed: 1 - f (1 - 1/3) = 1/2.
    assert duty(1, LatencyObjective(tpot_s=0.022 * 2 / 0.8), predictor) == pytest.approx(0.75)
    assert duty(1, LatencyObjective(), predictor) == 0.0
    assert duty(1, LatencyObjective(tpot_s=10.0), predictor) == 1.0
    assert duty(1, LatencyObjective(tpot_s=0.001), predictor) == 0.0


def test_what_was_saved_is_lent_as_well() -> None:
    goal = LatencyObjective(tpot_s=0.022 * 2 / 0.8)
    predictor = Predictor(PROFILE)
    # A tenth of a period's tokens need only nine tenths of it: 1 - f (1 - 1/3) = 0.9 / 2.
    assert duty(1, goal, predictor, saved=0.1) == pytest.approx(0.825)
    assert duty(1, goal, predictor, saved=-0.1) == duty(1, goal, predictor)
    assert duty(1, goal, predictor, saved=1.0) == 1.0
    assert duty(1, LatencyObjective(tpot_s=0.001), predictor, saved=1.0) == 0.0, "late by itself"


def test_savings_outlast_the_prefill_of_one_more_request() -> None:
    goal = LatencyObjective(ttft_s=1.0, tpot_s=0.05, margin=0.0)
    now = NOW + 1000 * MS
    shares = []
    for tokens in (22, 25, 28):
        stream = LiveRequest(1, NOW, size=1024, first_ns=NOW, last_ns=now, tokens=tokens)
        shares.append(measure((stream,), goal, Predictor(PROFILE), now).duty)
    # Left after a step beside rollouts: 34, 184 and 334 ms; a prefill takes 60.
    assert shares[0] == duty(1, goal, Predictor(PROFILE))
    assert shares[0] < shares[1] == shares[2] == 1.0


def test_windows_alternate() -> None:
    schedule = Schedule(10.0)
    assert [schedule.withheld(t) for t in (0.0, 9.9, 10.0, 19.9, 20.0)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert not Schedule(0.0).withheld(12345.0)


def test_no_ratio_below_the_floor() -> None:
    few = [1.0] * (SAMPLE_FLOOR - 1)
    enough = [1.0] * SAMPLE_FLOOR
    assert compare(few, enough, 0.5).value is None
    assert compare(enough, few, 0.5).value is None
    assert compare(enough, enough, 0.5).value == 1.0


def test_harm_is_found_and_noise_is_not() -> None:
    draw = random.Random(2)
    same, harmed = Meter(), Meter()
    for _ in range(400):
        for meter, factor in ((same, 1.0), (harmed, 1.5)):
            base = math.exp(draw.gauss(0, 0.3))
            meter.add(withheld=True, ttft_s=base, tpot_s=None)
            meter.add(withheld=False, ttft_s=factor * math.exp(draw.gauss(0, 0.3)), tpot_s=None)
    cycles = "withheld cycles"
    assert judge(harmed, None, 0.05, 0.9) == Harm(cycles, proven=True)
    assert judge(same, None, 0.05, 0.9) == Harm(cycles)
    assert judge(harmed, None, 0.0, 0.9) == Harm(), "no limit, no verdict"
    ratio = harmed.ratios((0.5,))["ttft"][0]
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 1.5 < ratio.high


def meter(factor: float, count: int, *, withheld: bool) -> Meter:
    made = Meter()
    for number in range(count):
        made.add(withheld=withheld, ttft_s=factor * (1 + number % 10 / 100), tpot_s=None)
    return made


def test_unlent_replicas_stand_in_until_the_windows_have_enough() -> None:
    lent, unlent = meter(1.5, 100, withheld=False), meter(1.0, 100, withheld=True)
    assert judge(lent, unlent, 0.05, 0.9) == Harm("un-lent replicas", proven=True)
    for _ in range(50):
        lent.add(withheld=True, ttft_s=1.62, tpot_s=None)
    assert judge(lent, unlent, 0.05, 0.9) == Harm("withheld cycles"), "slow with or without us"


def test_below_the_floor_nothing_is_judged() -> None:
    few = meter(1.0, SAMPLE_FLOOR - 1, withheld=True)
    assert judge(meter(9.0, 500, withheld=False), few, 0.05, 0.9) == Harm()
    assert (floor(0.5), floor(0.9), floor(0.99)) == (30, 30, 200)


def test_the_interval_covers_what_is_true_about_as_often_as_it_says() -> None:
    draw = random.Random(5)
    covered = 0
    for _ in range(300):
        one, two = ([math.exp(draw.gauss(0, 0.4)) for _ in range(120)] for _ in range(2))
        ratio = compare(one, two, 0.9)
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 1.0 <= ratio.high
    assert 0.84 <= covered / 300 <= 0.97
