"""What engines learn of pulls: a set-up and a time for each page, from few and noisy samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.engines.kv_store import (
    LONGEST_SETUP_SECONDS,
    READ_BACK_PAGES,
    SETUP_SECONDS,
    PullCost,
    PullPace,
)

TRUE = PullCost(0.004, 0.0002)


def measure(pace: PullPace, true: PullCost, times: int = 1) -> None:
    """Read pages back."""
    for _ in range(times):
        for pages in READ_BACK_PAGES:
            pace.note(true.of(pages), pages)


def test_one_measure_of_two_lengths_tells_set_up_and_pages_apart() -> None:
    pace = PullPace()
    measure(pace, TRUE)
    assert pace.cost.setup_seconds == pytest.approx(TRUE.setup_seconds)
    assert pace.cost.seconds_per_page == pytest.approx(TRUE.seconds_per_page)


@given(st.floats(0, 0.9), st.floats(1e-5, 1e-2), st.lists(st.integers(1, 2000), max_size=30))
def test_pulls_on_a_line_give_the_line_whatever_their_lengths(
    setup: float, each: float, lengths: list[int]
) -> None:
    true, pace = PullCost(setup, each), PullPace()
    measure(pace, true)
    for pages in lengths:
        pace.note(true.of(pages), pages)
    measure(pace, true, 3)
    longest = max(READ_BACK_PAGES)
    assert pace.cost.of(longest) == pytest.approx(true.of(longest), rel=0.1)
    # What short pulls do not tell from nothing is a page's time at least.
    assert pace.cost.seconds_per_page >= 0.95 * each
    assert pace.cost.setup_seconds <= setup * 1.05 + 1e-9


@pytest.mark.parametrize("lengths", [[8], [8] * 20, [30, 31, 30, 31, 30]])
def test_pulls_of_one_length_alone_lay_all_of_it_to_the_pages(lengths: list[int]) -> None:
    pace = PullPace()
    for pages in lengths:
        pace.note(TRUE.of(pages), pages)
    assert pace.cost.setup_seconds == SETUP_SECONDS
    assert pace.cost.of(30) > TRUE.of(30)


samples = st.lists(st.tuples(st.floats(1e-6, 1000), st.integers(1, 3000)), min_size=1, max_size=40)


@given(samples)
def test_whatever_was_seen_both_figures_stay_in_their_bounds(
    seen: list[tuple[float, int]],
) -> None:
    pace = PullPace()
    for seconds, pages in seen:
        pace.note(seconds, pages)
        assert 0 <= pace.cost.setup_seconds <= LONGEST_SETUP_SECONDS
        assert pace.cost.seconds_per_page > 0


def test_a_pull_that_was_frozen_in_its_middle_counts_for_four_times_what_was_expected() -> None:
    frozen, late = PullPace(), PullPace()
    for pace, seconds in ((frozen, 900.0), (late, 4 * TRUE.of(200))):
        measure(pace, TRUE, 5)
        pace.note(seconds, 200)
    assert frozen.cost.of(200) == pytest.approx(late.cost.of(200), rel=0.01)


def test_a_link_that_is_quick_again_is_believed_at_the_first_measure() -> None:
    pace = PullPace()
    measure(pace, PullCost(0.5, 0.1), 20)
    measure(pace, TRUE)
    assert pace.cost.of(500) == pytest.approx(TRUE.of(500), rel=0.01)


def test_long_pulls_that_turn_out_slower_are_believed_over_what_was_read_back() -> None:
    slow, pace = PullCost(0.03, 0.002), PullPace()
    measure(pace, TRUE, 5)
    for pages in (120, 700, 300, 250, 900, 150) * 5:
        pace.note(slow.of(pages), pages)
    assert pace.cost.of(400) == pytest.approx(slow.of(400), rel=0.1)
