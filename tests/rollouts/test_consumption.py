"""Which groups a trainer takes, so that none becomes too old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.errors import InvalidBound
from rose_core.rollouts.training.consumption import ConsumptionBound, next_batch

TWO = ConsumptionBound(batch=2, staleness=1)


def test_the_oldest_go_first_and_then_as_they_finished() -> None:
    assert next_batch([5, 4, 5], [], 5, TWO) == (1, 0)


def test_less_than_a_batch_waits() -> None:
    assert next_batch([5], [5], 5, TWO) == ()


def test_a_long_group_is_waited_for_when_its_last_chance_is_now() -> None:
    assert next_batch([5, 5], [4], 5, TWO) == ()
    assert next_batch([5, 5, 4], [], 5, TWO) == (2, 0)


def test_a_long_group_with_time_left_is_not_waited_for() -> None:
    assert next_batch([5, 5], [5, 5], 5, TWO) == (0, 1)


def test_it_waits_when_the_next_batches_could_not_hold_all_that_is_due_in_them() -> None:
    # Three of version 4 are due now; two is all a batch holds, so both must be of them.
    assert next_batch([4, 5], [4, 4], 5, TWO) == ()
    # Of five of version 5, one batch more can hold two: two must go now.
    assert next_batch([6, 6], [5, 5, 5, 5, 5], 5, TWO) == ()


def test_what_is_too_old_already_is_not_waited_for() -> None:
    assert next_batch([5, 5], [3], 5, TWO) == (0, 1)


def test_sizes_that_no_trainer_has_are_refused() -> None:
    with pytest.raises(InvalidBound, match="batch 0"):
        ConsumptionBound(0, 1)
    with pytest.raises(InvalidBound, match="staleness -1"):
        ConsumptionBound(1, -1)


@given(
    batch=st.integers(1, 4),
    staleness=st.integers(0, 3),
    endings=st.lists(st.integers(0, 10_000), min_size=1, max_size=200),
)
def test_under_the_bound_on_starts_none_is_ever_too_old_and_none_waits_for_ever(
    batch: int, staleness: int, endings: list[int]
) -> None:
    bound = ConsumptionBound(batch, staleness)
    version = begun = 0
    under_way: list[int] = []
    ready: list[int] = []
    for ending in endings:
        for _ in range(begun, (staleness + version + 1) * batch):
            begun += 1
            under_way.append(version)
        assert under_way, "every group has ended and the trainer waits for none"
        ready.append(under_way.pop(ending % len(under_way)))
        taken = next_batch(ready, under_way, version, bound)
        if taken:
            assert len(taken) == batch
            ready = [one for index, one in enumerate(ready) if index not in taken]
            version += 1
        assert all(version - one <= staleness for one in (*ready, *under_way))
