"""A whole replica in the guard's eyes: drained, asleep, back; every way out leads to Returning."""

from dataclasses import replace

import pytest

from rose_core.api import Reason
from rose_core.devices.sleeper import Stage
from rose_core.guard.gate import ReplicaFacts
from rose_core.guard.reasons import VACATING, GateReason
from rose_core.guard.whole import Phase, Whole, WholeLimits, WholeSeen, decide, judge
from rose_core.telemetry.signal import Doubt, ServingSignal
from rose_core.wire.sync import SignalSource

LIMITS = WholeLimits(drain_s=30.0)
NOW = 1000.0
AWAKE = WholeSeen(granted=True, told=Stage.AWAKE, quiet=True)
DRAINED = replace(AWAKE, ready=False)
SLEEPS = replace(DRAINED, told=Stage.ASLEEP)


def at(phase: Phase) -> Whole:
    return Whole(phase, since_s=NOW)


def after(state: Whole, seen: WholeSeen, later_s: float = 1.0) -> Whole:
    return decide(state, seen, LIMITS, NOW + later_s)


def test_it_is_drained_first_then_asleep_then_back() -> None:
    steps = (
        (AWAKE, Phase.DRAINING),
        (AWAKE, Phase.DRAINING),
        (replace(DRAINED, quiet=False), Phase.DRAINING),
        (replace(DRAINED, quiet=None), Phase.DRAINING),
        (DRAINED, Phase.DRAINED),
        (replace(DRAINED, told=Stage.FALLING), Phase.DRAINED),
        (SLEEPS, Phase.ASLEEP),
        (replace(SLEEPS, granted=None), Phase.ASLEEP),
        (replace(SLEEPS, granted=False), Phase.RETURNING),
        (replace(SLEEPS, granted=False, told=Stage.WAKING), Phase.RETURNING),
        (replace(DRAINED, granted=False), Phase.RETURNING),
        (replace(AWAKE, granted=False), Phase.OFF),
    )
    state = Whole()
    for number, (seen, phase) in enumerate(steps):
        state = decide(state, seen, LIMITS, NOW + number)
        assert state.phase is phase, number
        assert state.asks == (phase in {Phase.DRAINING, Phase.DRAINED, Phase.ASLEEP})
    assert state.word is None


@pytest.mark.parametrize(
    ("phase", "seen", "later_s", "word"),
    [
        (Phase.DRAINING, AWAKE, 30.0, Reason.NOT_DRAINED),
        (Phase.DRAINING, replace(DRAINED, quiet=False), 30.0, Reason.NOT_DRAINED),
        (Phase.DRAINED, AWAKE, 1.0, Reason.NOT_DRAINED),
        (Phase.DRAINED, DRAINED, 30.0, Reason.NOT_DRAINED),
        (Phase.DRAINED, replace(DRAINED, told=Stage.RECALLED), 1.0, Reason.SLEEP_REFUSED),
        (Phase.DRAINED, replace(DRAINED, told=Stage.WAKING), 1.0, Reason.SLEEP_REFUSED),
        (Phase.DRAINING, replace(AWAKE, told=None), 1.0, Reason.SLEEPER_UNAVAILABLE),
        (Phase.ASLEEP, replace(SLEEPS, told=None), 1.0, Reason.SLEEPER_UNAVAILABLE),
        (Phase.ASLEEP, replace(SLEEPS, busy=True), 1.0, Reason.REQUEST_WHILE_ASLEEP),
    ],
)
def test_a_failure_ends_it_with_its_word_and_serving_rests(
    phase: Phase, seen: WholeSeen, later_s: float, word: Reason
) -> None:
    failed = after(at(phase), seen, later_s)
    assert (failed.phase, failed.word, failed.asks) == (Phase.RETURNING, word, False)
    off = after(failed, AWAKE, later_s + 1)
    assert off.phase is Phase.OFF
    assert off.refusal(LIMITS, NOW + 40) is word
    assert after(off, AWAKE, later_s + 2).phase is Phase.OFF
    again = after(off, AWAKE, later_s + LIMITS.rest_s)
    assert (again.phase, again.word) == (Phase.DRAINING, None)


def test_a_release_under_way_is_not_called_late() -> None:
    falling = replace(DRAINED, told=Stage.FALLING)
    assert after(at(Phase.DRAINED), falling, 31.0).phase is Phase.DRAINED


def test_serving_that_does_not_wake_is_told_until_it_does() -> None:
    state = at(Phase.RETURNING)
    assert state.refusal(LIMITS, NOW) is Reason.SERVING_WAKING
    broken = after(state, replace(DRAINED, granted=False, told=Stage.BROKEN))
    assert (broken.phase, broken.word) == (Phase.RETURNING, Reason.WAKE_OVERDUE)
    assert after(broken, replace(DRAINED, granted=False)).phase is Phase.RETURNING, "not Ready yet"
    assert after(broken, replace(AWAKE, granted=False)).phase is Phase.OFF


@pytest.mark.parametrize(
    ("granted", "phase"), [(True, Phase.ASLEEP), (None, Phase.OFF), (False, Phase.RETURNING)]
)
def test_a_guard_that_finds_serving_asleep_goes_by_its_grant(
    granted: bool | None, phase: Phase
) -> None:
    assert after(Whole(), replace(SLEEPS, granted=granted)).phase is phase


def test_without_a_sleeper_nothing_begins() -> None:
    assert after(Whole(), replace(AWAKE, told=None)) == Whole()


QUIET = ServingSignal(running=0, source=SignalSource.WIRE_TAP)
IDLE = ReplicaFacts(signal=QUIET, ready=False)


@pytest.mark.parametrize("phase", Phase)
def test_the_gate_is_open_while_serving_sleeps_and_empty_before_and_after(phase: Phase) -> None:
    found = judge(IDLE, phase)
    assert found.open == (phase is Phase.ASLEEP)
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
    found = judge(replace(IDLE, **changes), Phase.ASLEEP)  # type: ignore[arg-type]
    assert (found.open, found.reason) == (False, reason)
