"""A statement: one ledger with its prices, everything a reader asks, and what is not known.

Cost per accepted trajectory and per correct answer, what a lent hour may cost at most, how the cost
moves with its price. None is unknown, never zero. The formulas are ``cost``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rose_core.accounting.cost import (
    Cost,
    Prices,
    break_even_lent_hour,
    cost,
    per_accepted,
    per_correct,
)
from rose_core.accounting.late import LateSource
from rose_core.accounting.ledger import GpuTier, Ledger

SWEEP = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class CostStatement:
    """What one span of time used, made and cost; money in micro-units.

    Attributes:
        opportunity: what lending took from serving: violations that it added and memory that was
            kept back, at their prices.
        violation: price of one of those; late_source: where it comes from, in words.
        break_even: lent price per hour at which borrowing pays as much as not borrowing.
        saved: cost per accepted trajectory against dedicated-only, as a share of the latter.
        sensitivity: cost per accepted trajectory by lent price, as shares of the dedicated one.
    """

    name: str
    ledger: Ledger
    cost: Cost
    per_accepted: float | None
    per_correct: float | None
    opportunity: float
    break_even: float | None
    saved: float | None
    sensitivity: tuple[tuple[float, float | None], ...]
    violation: int = 0
    late_source: str = LateSource.ASKED.value

    @property
    def borrowed_hours(self) -> float:
        """GPU-hours in which rollouts could compute on borrowed GPUs."""
        return self.ledger.gpu(GpuTier.BORROWED).computing_hours

    @property
    def dedicated_hours(self) -> float:
        """GPU-hours of dedicated engines."""
        return self.ledger.gpu(GpuTier.DEDICATED).held_hours


def statement(
    name: str,
    ledger: Ledger,
    prices: Prices,
    dedicated_only: Ledger | None = None,
    *,
    late_source: LateSource = LateSource.ASKED,
) -> CostStatement:
    """Make a statement.

    Args:
        name: of what it is about.
        ledger: what was used and made.
        prices: of everything.
        dedicated_only: the same work without borrowing, where somebody has run it.
        late_source: where the price of a late request comes from.
    """
    bill, price = cost(ledger, prices), per_accepted(ledger, prices)
    base = None if dedicated_only is None else per_accepted(dedicated_only, prices)
    saved = None if price is None or not base else 1.0 - price / base
    return CostStatement(
        name=name,
        ledger=ledger,
        cost=bill,
        per_accepted=price,
        per_correct=per_correct(ledger, prices),
        opportunity=bill.taken,
        break_even=None
        if dedicated_only is None
        else break_even_lent_hour(ledger, dedicated_only, prices),
        saved=saved,
        sensitivity=tuple((share, _at(ledger, prices, share)) for share in SWEEP),
        violation=prices.violation,
        late_source=late_source.value,
    )


def _at(ledger: Ledger, prices: Prices, share: float) -> float | None:
    lent = round(share * prices.dedicated_hour)
    return per_accepted(ledger, replace(prices, lent_hour=lent))
