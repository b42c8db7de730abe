"""What is saved at a boundary, when, and what may be gone back across."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.sandboxes.outside import EffectsCrossed, EgressEffect, cross
from rose_core.sandboxes.policy import (
    FORGOTTEN,
    SUSPEND_FACTOR,
    BoundaryAction,
    HostPressure,
    ModelWait,
    SaveCosts,
    SaveReason,
    TurnBoundary,
    decide,
    is_starved,
    learn_from,
    needed,
)
from rose_core.sandboxes.traffic import STARVED_SECONDS, CheckpointRequest, admit
from rose_core.sandboxes.turns import HOLD_SECONDS, OutOfTurn, SandboxClock, SandboxPhase


@dataclass(frozen=True)
class Changed:
    files: bool = False
    processes: bool = False
    unknown: tuple[str, ...] = ()


changes = st.builds(Changed, st.booleans(), st.booleans(), st.sampled_from([(), ("io_uring",)]))
waits = st.none() | st.builds(ModelWait, st.floats(0, 1000), st.floats(0, 1))
traffics = st.builds(HostPressure, st.booleans(), st.booleans())


@pytest.mark.parametrize(
    ("changed", "action"),
    [
        (Changed(), BoundaryAction.NONE),
        (Changed(files=True), BoundaryAction.FILES),
        (Changed(processes=True), BoundaryAction.PROCESSES),
        (Changed(files=True, processes=True), BoundaryAction.FULL),
        (Changed(unknown=("dead inspector",)), BoundaryAction.FULL),
    ],
)
def test_a_turn_saves_what_it_changed_and_all_where_that_is_not_known(
    changed: Changed, action: BoundaryAction
) -> None:
    assert decide(TurnBoundary(3, 2), changed, None, SaveCosts(), HostPressure()).action is action
    assert (
        decide(TurnBoundary(1), changed, None, SaveCosts(), HostPressure()).action
        is BoundaryAction.FULL
    )


@given(changes, waits, traffics, st.integers(0, 4))
def test_nothing_changed_is_left_unsaved_but_against_serving(
    changed: Changed, wait: ModelWait | None, traffic: HostPressure, saved: int
) -> None:
    made = decide(TurnBoundary(5, saved), changed, wait, SaveCosts(), traffic)
    wanted, _ = needed(changed, first=saved == 0)
    if traffic.serving_burns:
        assert made.action is BoundaryAction.NONE
        assert made.deferred == (wanted is not BoundaryAction.NONE)
    else:
        assert made.action in {wanted, BoundaryAction.SUSPEND}
        assert not made.deferred


def test_a_sandbox_that_waits_long_gives_its_memory_away_sooner_where_it_is_short() -> None:
    costs, wait = SaveCosts(suspend=0.6, resume=0.4), ModelWait(5.0, 0.9)
    assert (
        decide(TurnBoundary(2, 1), Changed(), wait, costs, HostPressure()).action
        is BoundaryAction.NONE
    )
    pressed = decide(TurnBoundary(2, 1), Changed(), wait, costs, HostPressure(memory_short=True))
    assert (pressed.action, pressed.reason) == (BoundaryAction.SUSPEND, SaveReason.LONG_WAIT)
    assert (
        decide(TurnBoundary(2, 1), Changed(), ModelWait(60, 0.5), costs, HostPressure()).action
        is BoundaryAction.SUSPEND
    )
    unsure = decide(
        TurnBoundary(2, 1), Changed(), ModelWait(60, 0.01), costs, HostPressure(memory_short=True)
    )
    assert unsure.action is BoundaryAction.NONE


def test_what_suspending_takes_is_learnt_from_how_it_went() -> None:
    costs, wait = SaveCosts(), ModelWait(5.0, 0.9)
    short = HostPressure(memory_short=True)
    for _ in range(20):  # of a host whose disk is busy
        costs = costs.suspended(4.0).resumed(2.0)
    assert costs.suspend == pytest.approx(4.0, rel=0.02)
    assert costs.resume == pytest.approx(2.0, rel=0.02)
    assert decide(TurnBoundary(2, 1), Changed(), wait, costs, short).action is BoundaryAction.NONE
    assert SaveCosts().suspended(1.6).suspend == pytest.approx(0.8)
    assert SaveCosts().resumed(0.4) == SaveCosts()


def decided(wait: ModelWait, costs: SaveCosts) -> tuple[BoundaryAction, SaveCosts]:
    """One wait of a host, and what it counts with then."""
    made = decide(TurnBoundary(2, 1), Changed(), wait, costs, HostPressure())
    return made.action, learn_from(made, wait, costs, HostPressure())


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1.1, 20))
def test_a_host_that_found_suspending_slow_tries_it_again(
    suspend: float, resume: float, longer: float
) -> None:
    """What a resume takes was learned from resumes alone: one slow one ended them for good."""
    usual = SaveCosts()
    costs = usual.suspended(suspend).resumed(resume)
    wait = ModelWait(longer * SUSPEND_FACTOR * (usual.suspend + usual.resume), 1.0)
    waits = 0
    action, costs = decided(wait, costs)
    while action is not BoundaryAction.SUSPEND:
        waits += 1
        assert waits < 5000, costs
        action, costs = decided(wait, costs)
    # What is slow still is not tried at each wait: some 1 / ``FORGOTTEN`` for each e-fold of it.
    found = usual.suspended(suspend).resumed(resume)
    slow = max(0.0, found.suspend - usual.suspend) + max(0.0, found.resume - usual.resume)
    quick = min(found.suspend, usual.suspend) + min(found.resume, usual.resume)
    worth = longer * (usual.suspend + usual.resume) - quick
    if slow > 2 * worth:
        assert waits > 0.9 * math.log(slow / worth) / FORGOTTEN


@given(waits, st.floats(0, 1e4), st.floats(0, 1e4))
def test_only_a_wait_that_would_usually_suspend_makes_a_host_forget(
    wait: ModelWait | None, suspend: float, resume: float
) -> None:
    costs, usual = SaveCosts(suspend, resume), SaveCosts()
    made = decide(TurnBoundary(2, 1), Changed(), wait, costs, HostPressure())
    then = learn_from(made, wait, costs, HostPressure())
    long = wait is not None and wait.sure > SUSPEND_FACTOR * (usual.suspend + usual.resume)
    if made.action is BoundaryAction.SUSPEND or not long:
        assert then == costs
    else:
        assert (then.suspend < suspend) == (suspend > usual.suspend)
        assert (then.resume < resume) == (resume > usual.resume)
    assert SaveCosts(math.inf, math.inf).forgotten().resume == math.inf


@given(st.floats(0.01, 60), st.lists(st.floats(0.01, 600), min_size=1, max_size=50))
def test_turns_without_a_record_end_in_one_that_is_saved_however_long_its_look_takes(
    save: float, turns: list[float]
) -> None:
    """Each has been held for ``HOLD_SECONDS``, so their number is bounded by what a save takes."""
    costs = SaveCosts()
    for _ in range(60):
        costs = costs.saved(save)
    clock, now, missed = SandboxClock(), 0.0, 0
    for act in turns:
        clock = clock.begin_wait(now)
        if is_starved(clock.unsaved(now), costs):
            clock = clock.saving().ready(now).stored()
            assert clock.unsaved(now + 1) == 0
            missed = 0
        else:
            clock = clock.ready(now)
            missed += 1
            assert (missed - 1) * HOLD_SECONDS < 10 * costs.save
        assert not missed or clock.recoverable_to < clock.turn
        now += HOLD_SECONDS + act


def test_checkpoints_run_by_expected_reply_and_never_against_serving() -> None:
    waiting = [
        CheckpointRequest("late", 10.0, 60.0),
        CheckpointRequest("soon", 10.5, 11.5),
        CheckpointRequest("unknown", 10.2),
    ]
    assert [one.key for one in admit(waiting, 11.0, 3, serving_burns=False)] == [
        "unknown",
        "soon",
        "late",
    ]
    assert admit(waiting, 11.0, 1, serving_burns=False) == (waiting[2],)
    assert admit(waiting, 11.0, 3, serving_burns=True) == ()
    starving = admit(waiting, 10.0 + STARVED_SECONDS, 1, serving_burns=False)
    assert starving == (waiting[0],)


def test_the_clock_holds_a_reply_until_its_record_is_durable() -> None:
    clock = SandboxClock().begin_wait(0.0, ModelWait(3.0, 0.8))
    assert (clock.phase, clock.turn, clock.expected) == (SandboxPhase.WAITING, 1, 3.0)
    saving = clock.saving().ready(1.0)
    assert not saving.released(1.1)
    assert saving.stored().phase is SandboxPhase.ACTING
    assert saving.stored().recoverable_to == 1
    assert saving.released(1.0 + HOLD_SECONDS)
    late = saving.failed()
    assert (late.phase, late.recoverable_to) == (SandboxPhase.ACTING, 0)


def test_a_suspended_sandbox_is_resumed_before_its_reply_is_released() -> None:
    away = SandboxClock().begin_wait(0.0).suspended()
    assert away.recoverable_to == 1
    answered = away.ready(5.0)
    assert not answered.released(100.0)
    assert answered.resumed().released(100.0)


def test_steps_that_a_state_does_not_have_are_refused_with_both_names() -> None:
    with pytest.raises(OutOfTurn, match="turn 0 is acting; this step needs waiting"):
        SandboxClock().saving()
    with pytest.raises(OutOfTurn, match="ended"):
        SandboxClock().ended().begin_wait(0.0)


def test_going_back_is_refused_across_what_cannot_be_repeated_alone() -> None:
    log = [
        EgressEffect(1, "POST", "pay.example/orders", 201),
        EgressEffect(2, "GET", "news.example/", 200),
        EgressEffect(3, "PUT", "shelf.example/a", 200),
        EgressEffect(4, "POST", "pay.example/orders", 200, keyed=True),
        EgressEffect(5, "CONNECT", "pay.example:443"),
    ]
    crossed = cross(log[:4], 1)
    assert [one.turn for one in crossed.stale] == [2]
    assert [one.turn for one in crossed.repeated] == [3, 4]
    with pytest.raises(EffectsCrossed, match="turn 5: CONNECT") as refused:
        cross(log, 4)
    assert refused.value.effects == (log[4],)
    assert cross(log, 4, flag=True).once == (log[4],)
    with pytest.raises(EffectsCrossed, match="turn 6: LOST"):
        cross([EgressEffect(6, "LOST", "")], 5)
