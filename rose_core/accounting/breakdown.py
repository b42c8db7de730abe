"""What a run cost and what drives it, as lines that people read: ``rose report`` and the demo.

Three prices stand beside each other: of dedicated tokens, of borrowed ones, and of what borrowing
took from serving (late requests, and memory that was kept back). Money is in micro-units; None is
unknown, never zero. Next step: ``correct`` takes the bill apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rose_core.accounting.correct import CostCorrect, Sampled, taken_apart
from rose_core.accounting.cost import MICRO, Cost, Prices, cost
from rose_core.accounting.late import LatePrice
from rose_core.accounting.ledger import GpuTier, Ledger

_MILLION: Final = 1_000_000

Line = tuple[str, str, str]
"""What, its figure, and what that is of."""


@dataclass(frozen=True)
class CostBreakdown:
    """What a run cost.

    Attributes:
        bill: by cause.
        factors: of the cost per correct answer.
        accepted, correct: trajectories that were trained on, and correct answers among them.
        late: requests that lending made late, at most.
        violation: price of one of them, and where it comes from.
        reserve: price of all of a GPU's memory for an hour.
        reserved_hours: GPU-hours that the memory kept back from serving comes to.
        unlent_hours: the same while nobody borrowed: of a run that has its pools to itself. A
            lease has none, because those of its pool are no lease's.
        threshold: price of a million borrowed tokens up to which borrowing pays.
        won_hours: dedicated GPU-hours that the borrowed tokens stand for.
        lent_hours: GPU-hours in which rollouts could compute on borrowed GPUs.
        harm: what borrowing took from serving, for a million borrowed tokens.
    """

    bill: Cost
    factors: CostCorrect | None
    accepted: int
    correct: int
    late: int
    violation: LatePrice
    reserve: float
    reserved_hours: float
    unlent_hours: float
    threshold: float | None
    won_hours: float | None
    lent_hours: float
    harm: float | None

    @property
    def slot(self) -> float | None:
        """Dedicated GPU-hours that a lent hour brings, on average over the slots."""
        if self.won_hours is None or not self.lent_hours:
            return None
        return self.won_hours / self.lent_hours

    @property
    def off_bill(self) -> float | None:
        """How far the factors, by the correct answers, are from the bill, as a share of it."""
        if self.factors is None or not self.bill.total:
            return None
        return self.factors.total * self.correct / self.bill.total - 1

    @property
    def shadow(self) -> float | None:
        """Dedicated GPU-hours won for each late request; None where none was late."""
        return None if self.won_hours is None or not self.late else self.won_hours / self.late


def breakdown(
    ledger: Ledger,
    prices: Prices,
    tokens: Sampled,
    *,
    violation: LatePrice,
) -> CostBreakdown:
    """Take a run's bill apart.

    Args:
        ledger: what was used and made, dedicated GPUs with the trainer's.
        prices: of everything.
        tokens: sampled and trained on.
        violation: the price of a late request, for the page; the bill has that of ``prices``.
    """
    bill, trajectories = cost(ledger, prices), ledger.trajectories
    factors = taken_apart(bill, tokens, trajectories.accepted, trajectories.correct)
    own, lent = tokens.by_tier.get(GpuTier.DEDICATED, 0), tokens.by_tier.get(GpuTier.BORROWED, 0)
    own_hours = ledger.dedicated.held_hours
    threshold = None
    if factors is not None and bill.dedicated and own:
        # Without borrowing every token costs what a dedicated one does.
        alone = factors.per_million[GpuTier.DEDICATED] * factors.tokens / _MILLION
        threshold = factors.borrowed_threshold(alone)
    return CostBreakdown(
        bill=bill,
        factors=factors,
        accepted=trajectories.accepted,
        correct=trajectories.correct,
        late=ledger.serving.added_violations,
        violation=violation,
        reserve=float(prices.reserve_hour),
        reserved_hours=ledger.reserved_hours,
        unlent_hours=ledger.unlent_reserved_hours,
        threshold=threshold,
        won_hours=lent * own_hours / own if own and own_hours else None,
        lent_hours=ledger.borrowed.computing_hours,
        harm=bill.taken / lent * _MILLION if lent else None,
    )


def figures(found: CostBreakdown) -> dict[str, float | None]:
    """The same as numbers, money in units of the currency."""
    parts, fields = found.factors, dict[str, float | None]()
    if parts is not None:
        fields = {
            "cost_per_correct": parts.total / MICRO,
            "per_million_tokens": parts.blended / MICRO,
            "answer_tokens": parts.answer_tokens,
            "reasoning_multiplier": parts.reasoning,
            "rollout_ratio": parts.rollout_ratio,
            "accept_rate": parts.accept_rate,
        }
        for tier, price in _by_tier(parts, found.bill).items():
            fields[f"per_million_{tier.lower()}_tokens"] = None if price is None else price / MICRO
    micros = {
        "bill": found.bill.total,
        "reserve": found.bill.reserve,
        "unlent_reserve": found.bill.unlent_reserve,
        "taken_per_million_borrowed_tokens": found.harm,
        "borrowing_pays_up_to": found.threshold,
        "late_request": found.violation.micros,
        "reserve_hour": found.reserve,
    }
    fields |= {name: None if one is None else one / MICRO for name, one in micros.items()}
    return fields | {
        "reserved_gpu_hours": found.reserved_hours,
        "unlent_reserved_gpu_hours": found.unlent_hours,
        "dedicated_hours_per_lent_hour": found.slot,
        "dedicated_hours_per_late_request": found.shadow,
        "factors_off_bill": found.off_bill,
    }


def lines(found: CostBreakdown) -> list[Line]:
    """Every figure in the order in which they make the bill."""
    bill, parts = found.bill, found.factors
    made = [
        ("bill", money(bill.total), f"of which the next {'six' if found.unlent_hours else 'five'}"),
        ("dedicated GPUs", _amount(bill.dedicated), "the trainer's too"),
        ("lent time", money(bill.borrowed), "while the gate was open"),
        ("requests made late", money(bill.violations), f"{found.late} of them at most"),
        (
            "memory kept back",
            money(bill.reserve),
            f"from serving: {found.reserved_hours:.3g} GPU-hours by its share of the memory",
        ),
        *_unlent(found),
        ("weights over the network", money(bill.network), ""),
        ("accepted, correct", f"{found.accepted}, {found.correct}", "said by the trainer"),
    ]
    if parts is None:
        why = "no answer was correct, or no token is known"
        made.append(("cost of a correct answer", "unknown", why))
    else:
        made += _factors(parts, bill)
        off = found.off_bill
        made.append(
            (
                "these, by the correct answers",
                money(parts.total * found.correct),
                "the bill again" if off is None else f"the bill again: {abs(off):.2%} off it",
            )
        )
    return [
        *made,
        (
            "taken from serving, for a million borrowed tokens",
            money(found.harm),
            "in the price of borrowed ones",
        ),
        (
            "borrowing pays up to",
            money(found.threshold),
            "for a million borrowed tokens: what dedicated ones cost, the trainer's GPUs in it",
        ),
        (
            "price of a late request",
            money(found.violation.micros),
            found.violation.source.value,
        ),
        (
            "price of the reserve",
            money(found.reserve),
            "for all of a GPU's memory, an hour",
        ),
        ("a lent GPU-hour brings", _hours(found.slot), "of dedicated ones, all slots together"),
        (
            "won for each late request",
            "none late" if found.won_hours is not None and not found.late else _hours(found.shadow),
            "of dedicated GPUs",
        ),
    ]


def _unlent(found: CostBreakdown) -> list[Line]:
    """Of a lease there is no such line: a zero would say that its pool keeps nothing back."""
    if not found.unlent_hours:
        return []
    hours = f"{found.unlent_hours:.3g} GPU-hours likewise"
    return [("memory kept back, not lent", money(found.bill.unlent_reserve), hours)]


def _factors(parts: CostCorrect, bill: Cost) -> list[Line]:
    """What multiplies to the cost of a correct answer."""
    return [
        ("cost of a correct answer", money(parts.total), "the product of the next five"),
        ("a million tokens", money(parts.blended), "of both kinds together"),
        ("answer", f"{parts.answer_tokens:.1f} tokens", "of an accepted trajectory"),
        ("reasoning multiplier", f"{parts.reasoning:.2f}", "its tokens over those of its answers"),
        ("rollout ratio", f"{parts.rollout_ratio:.2f}", "tokens sampled for each trained on"),
        ("accept rate", f"{parts.accept_rate:.1%}", "correct among those trained on; it divides"),
        *(
            (
                f"a million {tier.lower()} tokens",
                money(price),
                f"{parts.share[tier]:.0%} of all",
            )
            for tier, price in _by_tier(parts, bill).items()
        ),
    ]


def _by_tier(parts: CostCorrect, bill: Cost) -> dict[GpuTier, float | None]:
    """Of a million tokens; where nobody has told the dedicated GPUs, theirs are not free."""
    return {
        tier: None if tier is GpuTier.DEDICATED and not bill.dedicated else price
        for tier, price in parts.per_million.items()
    }


def money(micros: float | None) -> str:
    """In units of the currency."""
    return "unknown" if micros is None else f"{micros / MICRO:.4g}"


def _amount(micros: float) -> str:
    return money(micros or None)


def _hours(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} GPU-hours"
