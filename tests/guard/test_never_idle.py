"""Regime, open shares, margin, error budget: what lending to a never idle replica rests on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.guard.budget import BudgetBreaker, BurnLimits, BurnMeter
from rose_core.guard.gate import GateLimits, judge
from rose_core.guard.margin import LEAST, MOST, Margin
from rose_core.guard.predictor import CostProfile, Predictor
from rose_core.guard.reasons import GateReason
from rose_core.guard.regime import FEWEST, Gaps, cool_down
from rose_core.guard.shares import OpenTime, lendable
from rose_core.guard.slack import LatencyObjective
from rose_core.telemetry.book import LiveRequest
from tests.guard.worlds import MS, NOW, S, busy, facts

# --- regime


def gaps() -> Gaps:
    return Gaps(NOW, reopen_ns=50 * MS, window_ns=5 * S)


def test_what_came_before_counts_as_idle() -> None:
    assert gaps().share(NOW) == 1.0


def test_a_replica_is_never_idle_only_after_a_whole_window_of_work() -> None:
    kept = gaps()
    kept.note(busy=True, now_ns=NOW)
    shares = [kept.share(NOW + second * S) for second in (1, 4, 5)]
    assert shares == [pytest.approx(0.8), pytest.approx(0.2), 0.0]


def test_gaps_too_short_to_open_the_gate_do_not_count() -> None:
    kept = gaps()
    now = NOW
    for _ in range(100):
        kept.note(busy=True, now_ns=now)
        kept.note(busy=False, now_ns=now + 60 * MS)
        now += 100 * MS  # 40 ms of emptiness each time
    assert kept.share(now) == 0.0


def test_only_the_usable_part_of_a_gap_counts() -> None:
    kept = gaps()
    kept.note(busy=True, now_ns=NOW)
    now = NOW + 10 * S
    kept.note(busy=False, now_ns=now)
    assert kept.share(now + 550 * MS) == pytest.approx(0.1)
    kept.note(busy=True, now_ns=now + 550 * MS)
    assert kept.share(now + 4 * S) == pytest.approx(0.1), "remembered for the window"
    assert kept.share(now + 6 * S) == 0.0


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_the_usable_idle_share_lies_between_0_and_1_whatever_comes(lengths: list[int]) -> None:
    kept, now = gaps(), NOW
    for number, length in enumerate(lengths):
        kept.note(busy=number % 2 == 0, now_ns=now)
        now += length * MS
        assert 0.0 <= kept.share(now) <= 1.0


# --- cool-down


@pytest.mark.parametrize(
    ("gaps_ms", "rest_ms"),
    [
        ([800] * 40, 5),  # single requests
        ([30] * 20 + [800] * 40, 50),  # trains with 30 ms between their requests
        ([8] * 30 + [800] * 40, 10),  # trains with 8 ms
        ([800] * (FEWEST - 1), 50),  # too few to tell
        ([], 50),
    ],
)
def test_the_cool_down_outlasts_the_pauses_inside_a_train(gaps_ms: list[int], rest_ms: int) -> None:
    assert cool_down([gap * MS for gap in gaps_ms], 50 * MS) == rest_ms * MS


def test_the_cool_down_is_never_longer_than_the_limit() -> None:
    assert cool_down([800 * MS] * 40, 0) == 0
    assert cool_down([800 * MS] * 40, 4 * MS) == 4 * MS


def test_gaps_are_learned_from_the_traffic_and_long_rests_are_not() -> None:
    kept, now = gaps(), NOW
    for _ in range(40):
        kept.note(busy=True, now_ns=now)
        kept.note(busy=False, now_ns=now + 100 * MS)
        now += 900 * MS
    assert kept.cool_down_ns == 5 * MS
    for _ in range(20):  # trains begin: 20 ms between requests
        kept.note(busy=True, now_ns=now)
        kept.note(busy=False, now_ns=now + 100 * MS)
        now += 120 * MS
    assert kept.cool_down_ns == 50 * MS
    kept.note(busy=True, now_ns=now + 3600 * S)
    assert kept.cool_down_ns == 50 * MS, "an hour of rest is no gap"


# --- open shares


def test_open_time_adds_up_and_ends_with_its_permit() -> None:
    time = OpenTime(0)
    time.note(100, 0)
    assert (time.at(40), time.at(100), time.at(500)) == (40, 100, 100)
    time.note(0, 50)
    assert time.at(500) == 50, "closed early"
    time.note(700, 600)
    assert time.at(650) == 100


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(-1, 80)), max_size=60), st.data())
def test_open_time_of_a_moment_ago_is_what_it_was_then(
    steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    time, now, then = OpenTime(0), 0, {0: 0}
    for wait, ahead in steps:
        for at in range(now, now + wait + 1):
            then[at] = time.at(at)
        now += wait
        time.note(now + ahead if ahead >= 0 else 0, now)
    recent = max(0, now - 20)  # within the notes that are kept
    at = data.draw(st.integers(recent, now))
    assert time.at(at) == then[at], "a first token is told late and happened when it did"


@given(alone=st.floats(0.001, 1.0), slowdown=st.floats(1.05, 9.0), budget=st.floats(1.0, 9.0))
def test_what_may_be_lent_uses_the_budget_up_and_no_more(
    alone: float, slowdown: float, budget: float
) -> None:
    share = lendable(alone, slowdown * alone, budget * alone)
    takes = 1 / (1 - share * (1 - 1 / slowdown))
    assert takes <= budget + 1e-9
    assert share == 1.0 or takes == pytest.approx(budget)


def test_a_late_engine_lends_nothing() -> None:
    assert lendable(0.02, 0.04, 0.019) == 0.0


# --- margin


def test_the_margin_shrinks_while_nothing_happens_and_grows_at_once() -> None:
    margin = Margin()
    for _ in range(75):
        margin = margin.learn(0.5)
    assert margin.value == pytest.approx(LEAST)
    assert margin.learn(0.95) == margin
    assert margin.learn(1.01).value == pytest.approx(LEAST + 0.05)
    for _ in range(20):
        margin = margin.learn(3.0)
    assert margin.value == MOST


def test_the_margin_does_not_answer_for_what_rollouts_did_not_do() -> None:
    margin = Margin()
    assert margin.learn(1.2, 0.05) == margin, "6 % of 20 % too much"
    assert margin.learn(1.2, 0.15).value > margin.value
    assert margin.learn(3.0, 0.2) == margin
    assert margin.learn(3.0, 0.6).value > margin.value
    assert margin.learn(0.5, 0.0).value < margin.value


def test_a_saturated_engine_lends_nothing() -> None:
    goal = LatencyObjective(ttft_s=1.0, tpot_s=0.03, margin=0.05)
    predictor = Predictor(CostProfile(0.01, 0.01, 0.03, 0.0, shared_decode=2.0))
    stream = LiveRequest(1, NOW, size=10, first_ns=NOW - 3 * S, tokens=100)
    world = facts(busy(stream), idle_share=0.0, objective=goal, predictor=predictor)
    verdicts = [judge(world, GateLimits(), NOW + step * MS) for step in range(200)]
    assert {v.open for v in verdicts} == {False}
    assert {v.reason for v in verdicts} == {GateReason.NO_DECODE_SLACK}


# --- error budget and breaker


def burned(slow: int, good: int, *, exposed: bool = True, at: int = NOW) -> BurnMeter:
    meter = BurnMeter()
    for number in range(slow + good):
        meter.add(slow=number < slow, exposed=exposed, now_ns=at)
    return meter


def test_the_burn_is_slow_requests_over_what_the_percentile_allows() -> None:
    burn = burned(4, 96).burn(99, 300 * S, NOW)
    assert burn.rate == pytest.approx(4.0)
    assert (burn.requests, burn.slow, burn.exposed) == (100, 4, 4)


def test_below_the_floor_nothing_burns() -> None:
    assert burned(3, 26).burn(99, 300 * S, NOW).rate is None
    assert not burned(3, 26).burning(99, NOW)
    assert not burned(2, 60).burning(99, NOW), "two slow ones may be chance"
    assert burned(3, 60).burning(99, NOW)


def test_a_bad_minute_that_has_passed_does_not_open_the_breaker() -> None:
    meter = burned(10, 100)
    later = NOW + 120 * S
    assert meter.burning(99, NOW)
    for _ in range(40):
        meter.add(slow=False, exposed=True, now_ns=later)
    assert not meter.burning(99, later)
    assert meter.burn(99, 300 * S, NOW + 900 * S).requests == 0, "forgotten"


def test_a_lower_percentile_allows_more() -> None:
    assert not burned(4, 96).burning(95, NOW)


def test_nobody_is_blamed_without_evidence() -> None:
    burn = burned(5, 95, exposed=False).burn(99, 300 * S, NOW)
    assert (burn.slow, burn.exposed) == (5, 0)


def test_the_breaker_rests_from_its_last_cause() -> None:
    limits = BurnLimits(rest_ns=10 * S)
    breaker = (
        BudgetBreaker().trip("error-budget", NOW, limits).trip("error-budget", NOW + S, limits)
    )
    assert not BudgetBreaker().open(NOW)
    assert breaker.open(NOW + 10 * S)
    assert not breaker.open(NOW + 11 * S)
