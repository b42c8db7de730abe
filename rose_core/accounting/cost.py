"""Prices applied to a ledger.

Money is in micro-units of the owner's currency, as in a pool's ``pricePerGPUHourMicros``. A held
dedicated GPU costs its full price whether it computes or not. A borrowed GPU is paid for by its
serving owner; the borrower is charged the lent price for the time in which rollouts could compute,
and the owner's price for every violation that lending added and for the memory that was kept back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rose_core.accounting.ledger import Ledger

MICRO: Final = 1_000_000
"""Micro-units of a unit of the currency."""
GIGABYTE: Final = 10**9


@dataclass(frozen=True)
class Prices:
    """What things cost, in micro-units of one currency.

    Attributes:
        dedicated_hour, lent_hour: one GPU for one hour.
        violation: what the serving owner asks for one added SLO violation.
        gigabyte: weights moved between clusters.
        reserve_hour: all of a GPU's memory, kept back from serving for one hour.
    """

    dedicated_hour: int
    lent_hour: int
    violation: int = 0
    gigabyte: int = 0
    reserve_hour: int = 0


@dataclass(frozen=True)
class Cost:
    """Cost of a ledger by cause, in micro-units; the sum is ``total``."""

    dedicated: float
    borrowed: float
    violations: float
    network: float
    reserve: float = 0.0
    unlent_reserve: float = 0.0

    @property
    def total(self) -> float:
        """Everything together."""
        return self.dedicated + self.borrowed + self.taken + self.network

    @property
    def taken(self) -> float:
        """The opportunity cost: what lending took from serving, in requests and in memory.

        Memory that is kept back for lending is taken whether somebody borrows or not.
        """
        return self.violations + self.reserve + self.unlent_reserve


def cost(ledger: Ledger, prices: Prices) -> Cost:
    """Apply prices to a ledger."""
    return Cost(
        dedicated=ledger.dedicated.held_hours * prices.dedicated_hour,
        borrowed=ledger.borrowed.computing_hours * prices.lent_hour,
        violations=float(ledger.serving.added_violations * prices.violation),
        network=ledger.weight_bytes * prices.gigabyte / GIGABYTE,
        reserve=ledger.reserved_hours * prices.reserve_hour,
        unlent_reserve=ledger.unlent_reserved_hours * prices.reserve_hour,
    )


def per_accepted(ledger: Ledger, prices: Prices) -> float | None:
    """Micro-units per accepted trajectory; unknown when none was accepted."""
    return _per(cost(ledger, prices).total, ledger.trajectories.accepted)


def per_correct(ledger: Ledger, prices: Prices) -> float | None:
    """Micro-units per correct answer; unknown when there was none."""
    return _per(cost(ledger, prices).total, ledger.trajectories.correct)


def break_even_lent_hour(mixed: Ledger, dedicated_only: Ledger, prices: Prices) -> float | None:
    """Lent price at which borrowing costs as much per accepted trajectory as not borrowing.

    Solves ``fixed + lent_hour * hours = target * accepted`` for ``lent_hour``, where ``fixed`` is
    every cost of ``mixed`` but the lent hours and ``target`` is what ``dedicated_only`` pays per
    accepted trajectory.

    Returns:
        Micro-units per GPU-hour, below zero when borrowing loses even if it is free; unknown when
        either run accepted nothing or nothing was borrowed.
    """
    target = per_accepted(dedicated_only, prices)
    hours = mixed.borrowed.computing_hours
    accepted = mixed.trajectories.accepted
    if target is None or accepted == 0 or hours == 0:
        return None
    bill = cost(mixed, prices)
    return (target * accepted - (bill.total - bill.borrowed)) / hours


def _per(amount: float, count: int) -> float | None:
    return amount / count if count else None
