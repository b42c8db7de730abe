"""Statements: what they say, and what they leave unknown."""

import pytest

from rose_core.accounting.cost import Prices
from rose_core.accounting.ledger import GpuTime, Ledger, OutputTokens, ServingImpact, Trajectories
from rose_core.accounting.statement import SWEEP, statement

HOUR = 3_600_000
PRICES = Prices(dedicated_hour=4_000_000, lent_hour=1_000_000, violation=50_000)
ALONE = Ledger(dedicated=GpuTime(10 * HOUR, 10 * HOUR), trajectories=Trajectories(100, 100, 100))
MIXED = Ledger(
    dedicated=GpuTime(10 * HOUR, 10 * HOUR),
    borrowed=GpuTime(20 * HOUR, 10 * HOUR),
    tokens=OutputTokens(1_000_000),
    trajectories=Trajectories(200, 200, 200, 50),
    serving=ServingImpact(10_000, 4),
)


def test_a_statement_adds_up_and_compares_with_dedicated_only() -> None:
    found = statement("a", MIXED, PRICES, ALONE)
    assert found.cost.total == 40_000_000 + 10_000_000 + 200_000
    assert found.per_accepted == pytest.approx(50_200_000 / 200)
    assert found.per_correct == pytest.approx(50_200_000 / 50)
    assert found.opportunity == 200_000
    assert found.saved == pytest.approx(1 - 50.2 / 200 / 0.4)
    assert found.break_even == pytest.approx((0.4 * 200 - 40.2) / 10 * 1e6)
    assert found.borrowed_hours == 10
    assert found.dedicated_hours == 10


def test_the_cost_rises_with_the_price_of_a_lent_hour() -> None:
    prices = [price for _, price in statement("a", MIXED, PRICES, ALONE).sensitivity]
    assert [share for share, _ in statement("a", MIXED, PRICES).sensitivity] == list(SWEEP)
    known = [price for price in prices if price is not None]
    assert known == sorted(known)
    assert known[0] < known[-1]


def test_what_cannot_be_known_is_none() -> None:
    found = statement("a", Ledger(borrowed=GpuTime(HOUR, HOUR)), PRICES)
    assert found.per_accepted is None
    assert found.per_correct is None
    assert found.saved is None
    assert found.break_even is None
