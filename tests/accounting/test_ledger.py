"""Ledgers add up exactly, and say unknown where a share has no base."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.accounting.ledger import (
    GpuTier,
    GpuTime,
    Ledger,
    OutputTokens,
    ServingImpact,
    Trajectories,
    total,
)

COUNT = st.integers(min_value=0, max_value=10**9)
TIMES = st.tuples(COUNT, COUNT).map(lambda pair: GpuTime(max(pair), min(pair)))
LEDGERS = st.builds(
    Ledger,
    TIMES,
    TIMES,
    st.builds(OutputTokens, COUNT, COUNT, COUNT),
    st.builds(Trajectories, COUNT, COUNT, COUNT, COUNT),
    st.builds(ServingImpact, COUNT, COUNT),
    COUNT,
)


@given(st.lists(LEDGERS, max_size=5), st.lists(LEDGERS, max_size=5))
def test_the_sum_does_not_depend_on_how_ledgers_are_grouped(
    first: list[Ledger], second: list[Ledger]
) -> None:
    assert total(first + second) == total(first) + total(second)


@given(LEDGERS)
def test_the_empty_ledger_changes_nothing(ledger: Ledger) -> None:
    assert ledger + Ledger() == ledger


def test_duty_is_unknown_without_held_time() -> None:
    assert GpuTime().duty is None
    assert GpuTime(200, 50).duty == 0.25


@pytest.mark.parametrize(("held", "computing"), [(10, 11), (10, -1), (-1, 0)])
def test_impossible_times_are_refused(held: int, computing: int) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        GpuTime(held, computing)


def test_useful_tokens_are_what_is_neither_redone_nor_discarded() -> None:
    assert OutputTokens(produced=100, redone=10, discarded=25).useful == 65


def test_each_tier_has_its_time() -> None:
    ledger = Ledger(dedicated=GpuTime(5, 5), borrowed=GpuTime(9, 3))
    assert ledger.gpu(GpuTier.DEDICATED) == GpuTime(5, 5)
    assert ledger.gpu(GpuTier.BORROWED) == GpuTime(9, 3)
