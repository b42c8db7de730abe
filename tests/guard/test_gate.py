"""The gate's rules, one by one and in their order; then the three regimes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_core.guard.gate import GateLimits, GateVerdict, judge
from rose_core.guard.ladder import LadderLimits
from rose_core.guard.predictor import CostProfile, Predictor
from rose_core.guard.reasons import GateReason
from rose_core.guard.slack import LatencyObjective
from rose_core.telemetry.book import LiveRequest
from rose_core.telemetry.signal import Doubt, ServingSignal
from rose_core.wire.sync import SignalSource
from tests.guard.worlds import MS, NOW, S, busy, doubtful, facts, idle

LIMITS = GateLimits()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stop_requested": True}, GateReason.STOP_REQUESTED),
        ({"lending": False}, GateReason.POOL_NOT_LENDING),
        ({"gone": True}, GateReason.SERVING_GONE),
        ({"ready": False}, GateReason.SERVING_NOT_READY),
        ({"settled": False}, GateReason.SERVING_SETTLING),
        ({"memory_pressure": True}, GateReason.MEMORY_PRESSURE),
        ({"signal": ServingSignal(None, None)}, GateReason.SIGNAL_MISSING),
        ({"breaker_open": True}, GateReason.BREAKER_OPEN),
        ({"withheld": True}, GateReason.WITHHELD),
        ({"signal": busy()}, GateReason.SERVING_BUSY),
        ({"signal": idle(for_ms=49)}, GateReason.COOL_DOWN),
    ],
)
def test_each_bar_closes_an_idle_replica(changes: dict[str, object], reason: GateReason) -> None:
    verdict = judge(replace(facts(), **changes), LIMITS, NOW)  # type: ignore[arg-type]
    assert (verdict.open, verdict.reason) == (False, reason)


@pytest.mark.parametrize("doubt", list(Doubt))
def test_unknown_is_never_open(doubt: Doubt) -> None:
    verdict = judge(facts(doubtful(doubt)), LIMITS, NOW)
    assert not verdict.open
    assert verdict.reason.value == doubt.value


def test_every_doubt_is_a_gate_reason() -> None:
    assert {d.value for d in Doubt} <= {r.value for r in GateReason}


def test_idle_for_long_enough_opens() -> None:
    verdict = judge(facts(idle(for_ms=50)), LIMITS, NOW)
    assert (verdict.open, verdict.reason, verdict.duty) == (True, GateReason.IDLE, 1.0)


def test_a_learned_cool_down_opens_earlier_and_says_when_to_look() -> None:
    early = judge(facts(idle(for_ms=5), cool_down_ns=10 * MS), LIMITS, NOW)
    assert (early.open, early.reason) == (False, GateReason.COOL_DOWN)
    assert early.again_ns == NOW + 5 * MS
    assert judge(facts(idle(for_ms=10), cool_down_ns=10 * MS), LIMITS, NOW).open


def test_the_stop_button_comes_first() -> None:
    verdict = judge(facts(stop_requested=True, lending=False, gone=True), LIMITS, NOW)
    assert verdict.reason is GateReason.STOP_REQUESTED


# --- a replica that is never idle

GOAL = LatencyObjective(ttft_s=1.0, tpot_s=0.1)
COST = Predictor(CostProfile(0.01, 0.05, 0.02, 0.0, shared_prefill=2.0, shared_decode=2.0))


def streaming(tokens: int = 50, started_ms: int = 1000) -> LiveRequest:
    first = NOW - started_ms * MS
    return LiveRequest(1, first - 50 * MS, size=400, first_ns=first, last_ns=NOW, tokens=tokens)


def never_idle(signal: ServingSignal, now: int = NOW, **changes: object) -> GateVerdict:
    """The verdict on a replica without idle gaps."""
    world = {"idle_share": 0.0, "objective": GOAL, "predictor": COST, **changes}
    return judge(facts(signal, **world), LIMITS, now)


def test_slack_opens_a_busy_replica_that_is_never_idle() -> None:
    verdict = never_idle(busy(streaming()))
    assert (verdict.open, verdict.reason, verdict.duty) == (True, GateReason.SLACK, 1.0)


def test_idle_gaps_are_used_before_slack() -> None:
    verdict = never_idle(busy(streaming()), idle_share=0.2)
    assert verdict.reason is GateReason.SERVING_BUSY


def test_a_stream_late_by_less_than_a_period_only_pauses() -> None:
    late = streaming(tokens=12, started_ms=1000)  # 12 x 80 ms - 1 s - one step of 40 ms
    verdict = never_idle(busy(late))
    assert (verdict.open, verdict.reason) == (False, GateReason.SLACK)
    assert verdict.slack is not None
    assert verdict.slack.decode_s == pytest.approx(-0.08)


def test_a_relative_limit_alone_lends_between_prefills() -> None:
    goal = LatencyObjective(max_increase=0.25)
    waiting = LiveRequest(2, NOW, size=400)
    assert never_idle(busy(streaming(50, 500)), objective=goal).reason is GateReason.SLACK
    verdict = never_idle(busy(streaming(50, 500), waiting), objective=goal)
    assert verdict.reason is GateReason.NO_PREFILL_SLACK


@pytest.mark.parametrize(
    "goal", [LatencyObjective(), LatencyObjective(ttft_s=1.0), LatencyObjective(tpot_s=0.1)]
)
def test_without_both_goals_there_is_no_slack(goal: LatencyObjective) -> None:
    verdict = never_idle(busy(streaming()), objective=goal)
    assert verdict.reason is GateReason.SERVING_BUSY


def test_requests_that_nobody_saw_one_by_one_have_no_slack() -> None:
    counted = ServingSignal(SignalSource.LOADS, 3)
    verdict = never_idle(counted)
    assert verdict.reason is GateReason.SERVING_BUSY


def test_a_late_stream_closes() -> None:
    late = streaming(tokens=10, started_ms=1000)
    verdict = never_idle(busy(late))
    assert verdict.reason is GateReason.NO_DECODE_SLACK


def test_a_large_prompt_closes_and_a_small_one_need_not() -> None:
    small = LiveRequest(2, NOW, size=1000)
    large = LiveRequest(3, NOW, size=20_000)
    open_one = never_idle(busy(streaming(), small))
    closed_one = never_idle(busy(streaming(), large))
    assert open_one.open
    assert closed_one.reason is GateReason.NO_PREFILL_SLACK


def test_the_duty_paces_the_gate_within_a_control_period() -> None:
    # 20 ms alone, 40 ms shared, budget 0.8 x 30 = 24 ms: with a third of the time lent a step
    # takes 20 / (1 - 1/3 x 1/2) = 24 ms.
    goal = LatencyObjective(ttft_s=1.0, tpot_s=0.03)
    # Its 360 ms of savings are less than another prefill of its size would take.
    stream = replace(streaming(tokens=100, started_ms=2000), size=20_000)
    signal = busy(stream)
    opened = [never_idle(signal, NOW + step * MS, objective=goal) for step in range(100)]
    assert sum(v.open for v in opened) == 34, "a third of the period, begun milliseconds count"
    assert {v.reason for v in opened} == {GateReason.SLACK}
    assert all(abs(v.until_ns - NOW - 33 * MS) < MS for v in opened if v.open)
    changes = {v.again_ns for v in opened}
    assert changes == {opened[0].until_ns, NOW + 100 * MS}, "when to look again"


def test_a_permit_for_a_whole_period_does_not_lapse_at_its_border() -> None:
    """The next period is judged when it begins, and its open part begins there too."""
    overlap = GateLimits().overlap_ns
    whole = [never_idle(busy(streaming()), NOW + step * MS) for step in (0, 50, 99)]
    assert [v.duty for v in whole] == [1.0] * 3
    assert {v.until_ns for v in whole} == {NOW + 100 * MS + overlap}
    assert {v.again_ns for v in whole} == {NOW + 100 * MS}
    assert 0 < overlap < LadderLimits().permit_ns - GateLimits().period_ns


def test_a_duty_that_is_not_worth_it_closes() -> None:
    goal = LatencyObjective(ttft_s=1.0, tpot_s=0.0255)
    stream = streaming(tokens=100, started_ms=2000)
    verdict = never_idle(busy(stream), objective=goal)
    assert verdict.reason is GateReason.NO_DECODE_SLACK


def test_what_a_stream_saved_is_lent() -> None:
    goal = LatencyObjective(ttft_s=1.0, tpot_s=0.0255)
    verdict = never_idle(busy(streaming(tokens=100, started_ms=1900)), objective=goal)
    assert (verdict.open, verdict.duty) == (True, 1.0)


def test_a_relative_limit_caps_the_duty() -> None:
    goal = replace(GOAL, max_increase=0.25)
    verdict = never_idle(busy(streaming()), objective=goal)
    assert verdict.duty == pytest.approx(1 / 3)


def test_saturated_lends_nothing() -> None:
    goal = LatencyObjective(ttft_s=0.2, tpot_s=0.02)
    queue = tuple(LiveRequest(n, NOW - S, size=4000) for n in range(5))
    verdict = never_idle(busy(streaming(), *queue), objective=goal)
    assert not verdict.open
