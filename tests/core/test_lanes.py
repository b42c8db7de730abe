"""Which of a slot's two engines runs, verdict by verdict."""

from __future__ import annotations

import pytest

from rose_core.guard.gate import GateVerdict, closed
from rose_core.guard.lanes import BUSY, WIDE, LaneChoice, LaneLimits, choose, permitted
from rose_core.guard.reasons import GateReason

LIMITS = LaneLimits()
STEP_NS = 40_000_000
IDLE = GateVerdict(open=True, reason=GateReason.IDLE, duty=1.0)


def slack(duty: float) -> GateVerdict:
    return GateVerdict(open=True, reason=GateReason.SLACK, duty=duty)


def after(lane: LaneChoice, verdict: GateVerdict, seconds: float, start_ns: int = 1) -> LaneChoice:
    for now_ns in range(start_ns, start_ns + round(seconds * 1e9), STEP_NS):
        lane = choose(lane, verdict, LIMITS, now_ns)
    return lane


def test_scarce_slack_that_lasts_takes_the_busy_share() -> None:
    assert after(LaneChoice(), slack(0.3), 0.9).chosen == WIDE
    assert after(LaneChoice(), slack(0.3), 1.2).chosen == BUSY


def test_the_wide_share_comes_back_only_after_a_long_calm() -> None:
    assert after(LaneChoice(BUSY), IDLE, 9.0).chosen == BUSY
    assert after(LaneChoice(BUSY), IDLE, 11.0).chosen == WIDE
    assert after(LaneChoice(BUSY), slack(0.95), 11.0).chosen == WIDE


def test_bursts_that_end_in_idle_time_never_narrow() -> None:
    lane = LaneChoice()
    for second in range(60):
        verdict = closed(GateReason.SERVING_BUSY) if second % 2 else IDLE
        lane = after(lane, verdict, 1.0, 1 + second * 1_000_000_000)
    assert lane.chosen == WIDE


@pytest.mark.parametrize("chosen", [WIDE, BUSY])
def test_between_the_borders_nothing_changes(chosen: int) -> None:
    assert after(LaneChoice(chosen), slack(0.7), 60.0).chosen == chosen


def test_flapping_faster_than_the_borders_changes_nothing() -> None:
    lane = LaneChoice()
    for turn in range(40):
        verdict = slack(0.2) if turn % 2 else IDLE
        lane = after(lane, verdict, 0.5, 1 + turn * 500_000_000)
    assert lane.chosen == WIDE


def test_an_engine_that_does_not_serve_is_passed_over() -> None:
    assert permitted(BUSY, (WIDE,)) == WIDE
    assert permitted(WIDE, (BUSY,)) == BUSY
    assert permitted(BUSY, (WIDE, BUSY)) == BUSY
    assert permitted(BUSY, ()) == BUSY
    assert permitted(BUSY, None) == WIDE
