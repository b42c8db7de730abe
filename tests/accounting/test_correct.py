"""The factors of a correct answer's cost, against the bill that they take apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.accounting.correct import (
    Sampled,
    taken_apart,
)
from rose_core.accounting.cost import Cost
from rose_core.accounting.ledger import GpuTier

BILL = Cost(
    dedicated=9_000_000.0,
    borrowed=600_000.0,
    violations=150_000.0,
    network=50_000.0,
    reserve=200_000.0,
)
TOKENS = Sampled(
    {GpuTier.DEDICATED: 300_000, GpuTier.BORROWED: 100_000}, trained=200_000, reasoning=150_000
)


def test_each_factor_is_what_its_name_says() -> None:
    found = taken_apart(BILL, TOKENS, accepted=1000, correct=400)
    assert found is not None
    assert found.per_million == {GpuTier.DEDICATED: 30_000_000.0, GpuTier.BORROWED: 10_000_000.0}
    assert found.share == {GpuTier.DEDICATED: 0.75, GpuTier.BORROWED: 0.25}
    assert (found.answer_tokens, found.reasoning) == (50.0, 4.0)
    assert (found.rollout_ratio, found.accept_rate) == (2.0, 0.4)
    assert found.blended == 25_000_000.0
    assert found.total == pytest.approx(BILL.total / 400)


@given(
    paid=st.tuples(*(st.floats(0, 1e12) for _ in range(5))),
    sampled=st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
    trained=st.integers(1, 10**9),
    accepted=st.integers(1, 10**6),
    correct=st.integers(1, 10**6),
)
def test_the_factors_give_the_bill_again(
    paid: tuple[float, ...],
    sampled: tuple[int, int],
    trained: int,
    accepted: int,
    correct: int,
) -> None:
    bill = Cost(*paid)
    tokens = Sampled(
        dict(zip((GpuTier.DEDICATED, GpuTier.BORROWED), sampled, strict=True)), trained
    )
    found = taken_apart(bill, tokens, accepted, correct)
    if not sum(sampled):
        assert found is None
        return
    assert found is not None
    assert found.total * correct == pytest.approx(bill.total, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("tokens", "accepted", "correct"),
    [
        (Sampled({GpuTier.DEDICATED: 0}, 10), 1, 1),
        (Sampled({GpuTier.DEDICATED: 10}, 0), 1, 1),
        (Sampled({GpuTier.DEDICATED: 10}, 10), 0, 0),
        (Sampled({GpuTier.DEDICATED: 10}, 10), 5, 0),
        (Sampled({GpuTier.DEDICATED: 10}, 10, reasoning=10), 5, 1),
    ],
)
def test_what_nobody_counted_is_unknown_and_not_free(
    tokens: Sampled, accepted: int, correct: int
) -> None:
    assert taken_apart(BILL, tokens, accepted, correct) is None


def test_the_threshold_is_the_price_at_which_borrowing_makes_no_difference() -> None:
    found = taken_apart(BILL, TOKENS, 1000, 400)
    assert found is not None
    dedicated = found.per_million[GpuTier.DEDICATED]
    threshold = found.borrowed_threshold(dedicated * found.total / found.blended)
    assert threshold == pytest.approx(dedicated)
    free = found.borrowed_threshold(found.total * 0.5)
    assert free is not None
    assert free < 0, "half the cost cannot be had even if borrowing is free"
    gift = replace(found, per_million=dict.fromkeys(found.per_million, 0.0))
    assert gift.borrowed_threshold(0.0) == 0, "also where nothing has cost anything"
