"""What a router learns of its trainer's steps from nothing but turns and publishes."""

from __future__ import annotations

import pytest

from rose_core.rollouts.training.rhythm import Rhythm, TrainerPhase, observe


def looked(rhythm: Rhythm, begin: float, seconds: float, turns: int, head: str = "v0") -> Rhythm:
    """A look every second."""
    for second in range(round(seconds)):
        rhythm = observe(rhythm, turns, head, begin + second)
    return rhythm


def steps(count: int, *, turns: int = 12, busy: float = 60, pause: float = 120) -> Rhythm:
    """Steps of a trainer that generates and then trains; the last one has just ended."""
    rhythm, now = Rhythm(), 0.0
    for number in range(count):
        if number:
            rhythm = looked(rhythm, now, pause, 0)
            now += pause
        rhythm = looked(rhythm, now, busy, turns)
        now += busy
    return rhythm


END = 3 * 60 + 2 * 120


def test_nothing_is_known_before_the_first_turn() -> None:
    rhythm = looked(Rhythm(), 0, 100, 0)
    assert rhythm.phase(100) is TrainerPhase.UNKNOWN
    assert rhythm.idle_seconds(100) is None
    assert rhythm.expected_seconds(100) is None


def test_the_next_step_is_expected_after_the_usual_pause() -> None:
    rhythm = steps(3)
    assert rhythm.phase(END + 30) is TrainerPhase.TRAINING
    assert rhythm.expected_seconds(END + 30) == pytest.approx(90, abs=2)
    assert rhythm.expected_seconds(END + 130) == 0.0, "due"


def test_of_uneven_pauses_a_short_one_is_expected() -> None:
    rhythm, now = looked(Rhythm(), 0, 60, 4), 60.0
    for pause in (60.0, 200.0, 300.0, 400.0):
        now += pause
        rhythm = looked(rhythm, now, 60, 4)
        now += 60
    assert rhythm.expected_seconds(now + 20) == pytest.approx(180, abs=2)


def test_a_trainer_that_is_far_too_late_is_silent_and_nothing_is_expected() -> None:
    rhythm = steps(3)
    assert rhythm.phase(END + 190) is TrainerPhase.SILENT
    assert rhythm.expected_seconds(END + 190) is None


def test_a_pause_for_a_tool_call_is_no_training_phase() -> None:
    rhythm = looked(Rhythm(), 0, 60, 4)
    rhythm = looked(rhythm, 70, 60, 4)
    assert rhythm.pauses == ()
    assert rhythm.phase(140) is TrainerPhase.GENERATING


def test_a_version_after_the_last_turn_announces_a_step_until_turns_come() -> None:
    rhythm = steps(2)
    assert not rhythm.published, "the version that was there from the beginning says nothing"
    rhythm = observe(rhythm, 0, "v1", 300.0)
    assert rhythm.published
    assert not observe(rhythm, 3, "v1", 310.0).published


def test_the_first_publish_announces_a_step_and_another_checkpoint_does_not() -> None:
    one, other = "run@base.0123456789ab", "run@base.ba9876543210"
    rhythm = looked(Rhythm(), 0, 60, 12, one)
    rhythm = observe(rhythm, 0, other, 100.0)
    assert not rhythm.published, "an engine with another checkpoint has come, nobody published"
    assert observe(rhythm, 0, "run@1.0", 200.0).published


def test_the_peak_of_the_last_minute_outlives_a_lull() -> None:
    rhythm = observe(observe(Rhythm(), 40, "", 0.0), 2, "", 30.0)
    assert rhythm.most(59) == 40
    assert rhythm.most(61) == 2
    assert rhythm.most(91) == 0


def test_the_usual_step_is_the_median_of_the_last() -> None:
    rhythm, now = Rhythm(), 0.0
    for turns in (10, 12, 90, 11):
        rhythm = looked(rhythm, now, 60, turns)
        now += 160
    assert rhythm.usual == 12
