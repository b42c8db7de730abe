"""The tap's count against the engine's: exact within what can be known about the moment."""

from __future__ import annotations

import random

import pytest

from rose_core.identity import PodUid
from rose_core.telemetry.events import Health
from rose_core.telemetry.verify import Count, NumberBounds, SignalVerification, counted

NOW = 100_000_000_000


def exactly(requests: int, unsure: int = 0) -> Count:
    return Count(NumberBounds(requests, requests), unsure)


def between(least: int, most: int) -> Count:
    return Count(NumberBounds(least, most))


def agreed() -> SignalVerification:
    """Engine 1000 ahead of the tap's 10, compared twice."""
    first = SignalVerification().compare(1000, exactly(0), 1, 1, NOW)
    return first.compare(1010, exactly(10), 2, 2, NOW)


def beat(seen: int, finished: int, unsure: int = 0) -> Health:
    return Health(PodUid("r"), NOW, "", 0, False, 0, {}, 0, seen, finished, unsure)


def test_equal_changes_verify_and_levels_do_not_matter() -> None:
    first = SignalVerification().compare(1000, exactly(3), 1, 1, NOW)
    assert first.verified is None
    second = first.compare(1010, exactly(13), 2, 2, NOW)
    assert (second.verified, second.missed) == (True, 0)


def test_a_request_the_tap_did_not_see_contradicts_until_a_later_reading_agrees() -> None:
    missed = agreed().compare(1013, exactly(12), 3, 3, NOW)
    assert (missed.verified, missed.missed) == (False, 1)
    again = missed.compare(1014, exactly(13), 4, 4, NOW)
    assert (again.verified, again.missed) == (True, 0)


def test_counts_read_at_different_moments_contradict_nothing() -> None:
    """A request arrived while the engine was being asked: it may be in its count, or not."""
    for engine in (1010, 1011):
        assert agreed().compare(engine, between(10, 11), 3, 3, NOW).verified is True
    assert agreed().compare(1012, between(10, 11), 3, 3, NOW).verified is False


def test_a_contradiction_that_was_none_is_taken_back_by_the_next_reading() -> None:
    """The engine was late to count: the difference comes back to what had been agreed."""
    late = agreed().compare(1010, exactly(11), 3, 3, NOW)
    assert (late.verified, late.missed) == (False, -1)
    assert late.compare(1011, exactly(11), 4, 4, NOW).verified is True


def test_a_busy_replica_is_verified_once_little_can_hide() -> None:
    state = SignalVerification().compare(500, between(0, 6), 1, 1, NOW)
    soon = state.compare(560, between(55, 62), 2, 2, NOW)
    assert soon.verified is None, "a tenth of the requests could have been missed"
    later = soon.compare(2500, between(1996, 2002), 3, 3, NOW)
    assert later.verified is True


def test_a_path_that_the_tap_cannot_see_is_found_on_a_busy_replica_too() -> None:
    state, draw = SignalVerification(), random.Random(3)
    verdicts = []
    for number in range(1, 200):
        visible = number * 20
        slack = draw.randrange(0, 5)
        engine = number * 22 + draw.randrange(0, slack + 1)
        state = state.compare(engine, between(visible, visible + slack), number, number, NOW)
        verdicts.append(state.verified)
    assert True not in verdicts
    assert verdicts[-1] is False


@pytest.mark.parametrize("counts_them", [True, False])
def test_engines_may_count_requests_they_never_answered_or_not(counts_them: bool) -> None:
    state = agreed()
    for number in range(1, 30):
        tap = 10 + 5 * number
        engine = 1000 + tap - (0 if counts_them else number)
        state = state.compare(engine, exactly(tap, unsure=number), 2 + number, 2 + number, NOW)
        assert state.verified is True
    assert state.compare(engine + 1, exactly(tap, unsure=29), 40, 40, NOW).verified is False


def test_own_scrapes_prove_the_path() -> None:
    base = SignalVerification().compare(10, exactly(10), 1, 1, NOW)
    assert base.compare(10, exactly(10), 2, 1, NOW).verified is False
    assert base.compare(10, exactly(10), 2, 5, NOW).verified is True, "others scrape as well"


def test_a_restarted_engine_starts_anew() -> None:
    assert agreed().compare(0, exactly(10), 3, 3, NOW).verified is None
    assert agreed().compare(1010, exactly(0), 3, 3, NOW).verified is None, "a restarted tap too"


def test_an_engine_that_does_not_answer_keeps_its_word_for_a_minute() -> None:
    assert agreed().unanswered(NOW + 59_000_000_000).verified is True
    assert agreed().unanswered(NOW + 61_000_000_000).verified is None


def test_bounds_follow_the_moment_at_which_the_engine_counts() -> None:
    before, after = beat(8, 5), beat(10, 9, 2)
    assert counted(before, after, at_arrival=True) == Count(NumberBounds(8, 10), 2)
    assert counted(before, after, at_arrival=False) == Count(NumberBounds(5, 9), 2)
