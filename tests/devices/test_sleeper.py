"""A serving engine that sleeps under a grant: the table, and what brings it back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_core.devices.sleeper import (
    Sleeper,
    SleeperLimits,
    SleeperOrder,
    SleeperSeen,
    SleepStage,
    decide,
    unknown,
)

GIB = 1 << 30
LIMITS = SleeperLimits(least_bytes=10 * GIB)
READY = SleeperSeen(granted=True, idle=True, reference=True)
LAPSED = SleeperSeen(granted=False)
NOW = 1000.0


def at(stage: SleepStage, **known: object) -> Sleeper:
    return replace(Sleeper(stage, since_s=NOW, ordered_s=NOW), **known)  # type: ignore[arg-type]


def test_a_granted_idle_engine_is_asked_and_lent_once_the_memory_is_measured_free() -> None:
    falling, order = decide(Sleeper(), READY, LIMITS, NOW)
    assert (falling.stage, order) == (SleepStage.FALLING, SleeperOrder.RELEASE)
    reported = SleeperSeen(granted=True, released_bytes=9 * GIB)
    still, order = decide(falling, reported, LIMITS, NOW + 1)
    assert (still.stage, still.lendable, order) == (SleepStage.FALLING, False, SleeperOrder.NONE)
    asleep, _ = decide(still, replace(reported, released_bytes=10 * GIB), LIMITS, NOW + 2)
    assert asleep.lendable


@pytest.mark.parametrize(
    "seen",
    [
        LAPSED,
        replace(READY, idle=False),
        replace(READY, idle=None),
        replace(READY, reference=False),
    ],
)
def test_without_grant_idleness_or_reference_it_stays_awake(seen: SleeperSeen) -> None:
    assert decide(Sleeper(), seen, LIMITS, NOW) == (Sleeper(), SleeperOrder.NONE)


@pytest.mark.parametrize(("freed", "word"), [(0, "NothingReleased"), (None, "MemoryUnknown")])
def test_an_answer_that_freed_nothing_is_undone_and_not_tried_again_soon(
    freed: int | None, word: str
) -> None:
    seen = SleeperSeen(granted=True, released_bytes=freed)
    recalled, _ = decide(at(SleepStage.FALLING), seen, LIMITS, NOW + LIMITS.effect_s)
    assert (recalled.stage, recalled.refusal) == (SleepStage.RECALLED, word)
    waking, order = decide(recalled, SleeperSeen(granted=True, vacated=True), LIMITS, NOW + 11)
    assert (waking.stage, order) == (SleepStage.WAKING, SleeperOrder.RESUME)
    awake, _ = decide(waking, SleeperSeen(granted=True, well=True), LIMITS, NOW + 12)
    assert decide(awake, READY, LIMITS, NOW + 13) == (awake, SleeperOrder.NONE)
    later, order = decide(awake, READY, LIMITS, NOW + 11 + LIMITS.rest_s)
    assert (later.stage, later.refusal, order) == (SleepStage.FALLING, "", SleeperOrder.RELEASE)


def test_an_engine_that_refused_is_only_asked_whether_it_is_well() -> None:
    waking, order = decide(
        at(SleepStage.FALLING), SleeperSeen(granted=True, refused="404"), LIMITS, NOW + 1
    )
    assert (waking.stage, waking.refusal, order) == (SleepStage.WAKING, "404", SleeperOrder.NONE)
    assert (
        decide(waking, SleeperSeen(granted=True, well=True), LIMITS, NOW + 2)[1]
        is SleeperOrder.NONE
    )


@pytest.mark.parametrize("stage", [SleepStage.FALLING, SleepStage.ASLEEP])
def test_a_lapsed_grant_recalls(stage: SleepStage) -> None:
    assert decide(at(stage), LAPSED, LIMITS, NOW)[0].stage is SleepStage.RECALLED


@pytest.mark.parametrize("vacated", [False, None])
def test_borrowers_that_do_not_leave_delay_the_resume_but_not_for_ever(
    vacated: bool | None,
) -> None:
    seen = SleeperSeen(granted=False, vacated=vacated)
    assert decide(at(SleepStage.RECALLED), seen, LIMITS, NOW + 14)[1] is SleeperOrder.NONE
    assert decide(at(SleepStage.RECALLED), seen, LIMITS, NOW + 15)[1] is SleeperOrder.RESUME


def test_an_engine_that_does_not_wake_up_is_resumed_again_and_then_restarted() -> None:
    state, orders = at(SleepStage.WAKING), []
    for second in range(1, 200):
        state, order = decide(state, SleeperSeen(granted=False, well=False), LIMITS, NOW + second)
        if order is not SleeperOrder.NONE:
            orders.append((second, order))
    assert orders == [
        *((second, SleeperOrder.RESUME) for second in (10, 20, 30, 40, 50)),
        (60, SleeperOrder.RESTART),
        (180, SleeperOrder.RESTART),
    ]
    awake, _ = decide(state, SleeperSeen(granted=False, well=True), LIMITS, NOW + 200)
    assert awake.stage is SleepStage.AWAKE


def test_whoever_remembers_nothing_asks_before_it_resumes() -> None:
    lost = unknown(NOW)
    well = SleeperSeen(granted=False, well=True)
    assert decide(lost, well, LIMITS, NOW + 1)[0].stage is SleepStage.AWAKE
    ill = replace(well, well=False)
    assert decide(lost, ill, LIMITS, NOW + 1)[1] is SleeperOrder.NONE
    assert decide(lost, ill, LIMITS, NOW + LIMITS.repeat_s)[1] is SleeperOrder.RESUME


@pytest.mark.parametrize("stage", list(SleepStage))
@pytest.mark.parametrize("released", [None, 0, 20 * GIB])
@pytest.mark.parametrize("vacated", [None, False])
def test_without_a_grant_every_stage_leads_to_awake_or_a_restart(
    stage: SleepStage, released: int | None, vacated: bool | None
) -> None:
    state, orders = at(stage), set()
    resumed = stage in {SleepStage.AWAKE, SleepStage.WAKING, SleepStage.BROKEN}
    for second in range(400):
        seen = SleeperSeen(
            granted=False,
            idle=True,
            reference=True,
            released_bytes=released,
            vacated=vacated,
            well=resumed,
        )
        state, order = decide(state, seen, LIMITS, NOW + second)
        orders.add(order)
        resumed = resumed or order is SleeperOrder.RESUME
    assert state.stage is SleepStage.AWAKE
    assert SleeperOrder.RELEASE not in orders
