"""Prices applied to ledgers, checked against sums done by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.accounting.cost import (
    Prices,
    break_even_lent_hour,
    cost,
    per_accepted,
    per_correct,
)
from rose_core.accounting.ledger import GpuTime, Ledger, ServingImpact, Trajectories

HOUR = 3_600_000
PRICES = Prices(dedicated_hour=4_000_000, lent_hour=1_000_000, violation=500, gigabyte=20_000)


def run(dedicated_hours: int, borrowed_hours: int, accepted: int, violations: int = 0) -> Ledger:
    return Ledger(
        dedicated=GpuTime(dedicated_hours * HOUR, dedicated_hours * HOUR),
        borrowed=GpuTime(2 * borrowed_hours * HOUR, borrowed_hours * HOUR),
        trajectories=Trajectories(accepted, accepted, accepted, accepted // 2),
        serving=ServingImpact(1_000, violations),
        weight_bytes=3 * 10**9,
    )


def test_each_cause_is_priced() -> None:
    bill = cost(run(2, 6, 100, violations=4), PRICES)
    assert (bill.dedicated, bill.borrowed, bill.violations, bill.network) == (
        8_000_000,
        6_000_000,
        2_000,
        60_000,
    )
    assert bill.total == 14_062_000


def test_memory_kept_back_is_in_the_bill_and_what_lending_took_is_a_part_of_it() -> None:
    kept = replace(run(2, 6, 100, violations=4), reserved_milliseconds=3 * HOUR)
    bill = cost(kept, replace(PRICES, reserve_hour=4_000_000))
    assert bill.reserve == 12_000_000
    assert bill.taken == 12_002_000
    assert bill.total == 14_062_000 + 12_000_000
    assert cost(kept + kept, replace(PRICES, reserve_hour=4_000_000)).reserve == 24_000_000
    assert cost(kept, PRICES).total == 14_062_000, "memory without a price"


def test_memory_kept_back_while_nobody_borrows_is_in_the_bill_by_name() -> None:
    asked = replace(PRICES, reserve_hour=4_000_000)
    kept = replace(run(2, 6, 100), reserved_milliseconds=HOUR)
    pool = Ledger(unlent_reserved_milliseconds=3 * HOUR)
    bill = cost(kept + pool, asked)
    assert (bill.reserve, bill.unlent_reserve) == (4_000_000, 12_000_000)
    assert bill.total == cost(kept, asked).total + cost(pool, asked).total


def test_borrowed_time_is_charged_only_while_rollouts_could_compute() -> None:
    idle = Ledger(borrowed=GpuTime(10 * HOUR, 0))
    assert cost(idle, PRICES).total == 0


def test_cost_per_result_is_unknown_without_results() -> None:
    assert per_accepted(run(1, 1, 0), PRICES) is None
    assert per_correct(run(1, 1, 1), PRICES) is None
    assert per_correct(run(1, 1, 10), PRICES) == cost(run(1, 1, 10), PRICES).total / 5


@given(
    dedicated=st.integers(1, 50),
    borrowed=st.integers(1, 50),
    accepted=st.integers(1, 10_000),
    reference=st.integers(1, 10_000),
)
def test_at_the_break_even_price_both_ways_cost_the_same(
    dedicated: int, borrowed: int, accepted: int, reference: int
) -> None:
    mixed, alone = run(dedicated, borrowed, accepted), run(dedicated, 0, reference)
    price = break_even_lent_hour(mixed, alone, PRICES)
    assert price is not None
    bill = cost(mixed, PRICES)
    at_price = bill.total - bill.borrowed + price * borrowed
    assert at_price / accepted == pytest.approx(per_accepted(alone, PRICES), rel=1e-9)


def test_break_even_is_unknown_without_borrowing_or_results() -> None:
    assert break_even_lent_hour(run(1, 0, 5), run(1, 0, 5), PRICES) is None
    assert break_even_lent_hour(run(1, 1, 0), run(1, 0, 5), PRICES) is None
    assert break_even_lent_hour(run(1, 1, 5), run(1, 0, 0), PRICES) is None
