"""A whole replica in the guard's eyes: drained, asleep, back; every way out leads to Returning."""

from dataclasses import replace

import pytest

from rose_core.api import Reason
from rose_core.devices.sleeper import SleepStage
from rose_core.guard.gate import ReplicaFacts
from rose_core.guard.reasons import VACATING, GateReason
from rose_core.guard.whole import Whole, WholeLimits, WholePhase, WholeSeen, decide, judge
from rose_core.telemetry.signal import Doubt, ServingSignal
from rose_core.wire.sync import SignalSource

LIMITS = WholeLimits(drain_s=30.0)
NOW = 1000.0
AWAKE = WholeSeen(granted=True, stage=SleepStage.AWAKE, quiet=True)
DRAINED = replace(AWAKE, ready=False)
SLEEPS = replace(DRAINED, stage=SleepStage.ASLEEP)


def at(phase: WholePhase) -> Whole:
    return Whole(phase, since_s=NOW)


def after(state: Whole, seen: WholeSeen, later_s: float = 1.0) -> Whole:
    return decide(state, seen, LIMITS, NOW + later_s)


def test_it_is_drained_first_then_asleep_then_back() -> None:
    steps = (
        (AWAKE, WholePhase.DRAINING),
        (AWAKE, WholePhase.DRAINING),
        (replace(DRAINED, quiet=False), WholePhase.DRAINING),
        (replace(DRAINED, quiet=None), WholePhase.DRAINING),
        (DRAINED, WholePhase.DRAINED),
        (replace(DRAINED, stage=SleepStage.FALLING), WholePhase.DRAINED),
        (SLEEPS, WholePhase.ASLEEP),
        (replace(SLEEPS, granted=None), WholePhase.ASLEEP),
        (replace(SLEEPS, granted=False), WholePhase.RETURNING),
        (replace(SLEEPS, granted=False, stage=SleepStage.WAKING), WholePhase.RETURNING),
        (replace(DRAINED, granted=False), WholePhase.RETURNING),
        (replace(AWAKE, granted=False), WholePhase.OFF),
    )
    state = Whole()
    for number, (seen, phase) in enumerate(steps):
        state = decide(state, seen, LIMITS, NOW + number)
        assert state.phase is phase, number
        assert state.asks == (phase in {WholePhase.DRAINING, WholePhase.DRAINED, WholePhase.ASLEEP})
    assert state.failure is None


@pytest.mark.parametrize(
    ("phase", "seen", "later_s", "failure"),
    [
        (WholePhase.DRAINING, AWAKE, 30.0, Reason.NOT_DRAINED),
        (WholePhase.DRAINING, replace(DRAINED, quiet=False), 30.0, Reason.NOT_DRAINED),
        (WholePhase.DRAINED, AWAKE, 1.0, Reason.NOT_DRAINED),
        (WholePhase.DRAINED, DRAINED, 30.0, Reason.NOT_DRAINED),
        (
            WholePhase.DRAINED,
            replace(DRAINED, stage=SleepStage.RECALLED),
            1.0,
            Reason.SLEEP_REFUSED,
        ),
        (WholePhase.DRAINED, replace(DRAINED, stage=SleepStage.WAKING), 1.0, Reason.SLEEP_REFUSED),
        (WholePhase.DRAINING, replace(AWAKE, stage=None), 1.0, Reason.SLEEPER_UNAVAILABLE),
        (WholePhase.ASLEEP, replace(SLEEPS, stage=None), 1.0, Reason.SLEEPER_UNAVAILABLE),
        (WholePhase.ASLEEP, replace(SLEEPS, busy=True), 1.0, Reason.REQUEST_WHILE_ASLEEP),
    ],
)
def test_a_failure_ends_it_with_its_word_and_serving_rests(
    phase: WholePhase, seen: WholeSeen, later_s: float, failure: Reason
) -> None:
    failed = after(at(phase), seen, later_s)
    assert (failed.phase, failed.failure, failed.asks) == (WholePhase.RETURNING, failure, False)
    off = after(failed, AWAKE, later_s + 1)
    assert off.phase is WholePhase.OFF
    assert off.refusal(LIMITS, NOW + 40) is failure
    assert after(off, AWAKE, later_s + 2).phase is WholePhase.OFF
    again = after(off, AWAKE, later_s + LIMITS.rest_s)
    assert (again.phase, again.failure) == (WholePhase.DRAINING, None)


def test_a_release_under_way_is_not_called_late() -> None:
    falling = replace(DRAINED, stage=SleepStage.FALLING)
    assert after(at(WholePhase.DRAINED), falling, 31.0).phase is WholePhase.DRAINED


def test_serving_that_does_not_wake_is_told_until_it_does() -> None:
    state = at(WholePhase.RETURNING)
    assert state.refusal(LIMITS, NOW) is Reason.SERVING_WAKING
    broken = after(state, replace(DRAINED, granted=False, stage=SleepStage.BROKEN))
    assert (broken.phase, broken.failure) == (WholePhase.RETURNING, Reason.WAKE_OVERDUE)
    assert after(broken, replace(DRAINED, granted=False)).phase is WholePhase.RETURNING, (
        "not Ready yet"
    )
    assert after(broken, replace(AWAKE, granted=False)).phase is WholePhase.OFF


@pytest.mark.parametrize(
    ("granted", "phase"),
    [(True, WholePhase.ASLEEP), (None, WholePhase.OFF), (False, WholePhase.RETURNING)],
)
def test_a_guard_that_finds_serving_asleep_goes_by_its_grant(
    granted: bool | None, phase: WholePhase
) -> None:
    assert after(Whole(), replace(SLEEPS, granted=granted)).phase is phase


def test_without_a_sleeper_nothing_begins() -> None:
    assert after(Whole(), replace(AWAKE, stage=None)) == Whole()


QUIET = ServingSignal(running=0, source=SignalSource.WIRE_TAP)
IDLE = ReplicaFacts(signal=QUIET, ready=False)


@pytest.mark.parametrize("phase", WholePhase)
def test_the_gate_is_open_while_serving_sleeps_and_empty_before_and_after(
    phase: WholePhase,
) -> None:
    found = judge(IDLE, phase)
    assert found.open == (phase is WholePhase.ASLEEP)
    assert found.open or found.reason in VACATING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stop_requested": True}, GateReason.STOP_REQUESTED),
        ({"lending": False}, GateReason.POOL_NOT_LENDING),
        ({"gone": True}, GateReason.SERVING_GONE),
        ({"device_unfit": True}, GateReason.DEVICE_UNFIT),
        (
            {"signal": replace(QUIET, running=1)},
            GateReason.SERVING_BUSY,
        ),
        (
            {"signal": replace(QUIET, running=None)},
            GateReason.SIGNAL_MISSING,
        ),
        (
            {"signal": replace(QUIET, doubt=Doubt.STALE)},
            GateReason.SIGNAL_STALE,
        ),
    ],
)
def test_sleep_opens_no_gate_that_something_else_closes(
    changes: dict[str, object], reason: GateReason
) -> None:
    found = judge(replace(IDLE, **changes), WholePhase.ASLEEP)  # type: ignore[arg-type]
    assert (found.open, found.reason) == (False, reason)
