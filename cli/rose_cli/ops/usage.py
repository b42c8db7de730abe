"""What leases and pools have used, made and cost, pure: rows for ``report``, and statements.

Ledgers add up (``rose_core.accounting``), so a row of a pool or a namespace is its leases' sum.
Charged is, at the pool's ``pricePerGPUHourMicros``, GPU time in which rollouts could compute, and
what is asked for violations, moved weights and memory that was kept back. Time under a grant with a
shut gate costs nothing but that memory. Memory that a pool keeps back while nobody borrows is
charged to no lease: it is the pool's own line (``idle_reserves``), so that all lines together are
the whole bill.
Unknown figures are empty, never zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rose_cli.ops.tables import Row
from rose_core.accounting.breakdown import CostBreakdown, breakdown
from rose_core.accounting.correct import Sampled
from rose_core.accounting.cost import GIGABYTE, MICRO, Cost, Prices, cost
from rose_core.accounting.late import (
    LatePrice,
    ServedTraffic,
    late_price,
)
from rose_core.accounting.leases import UNLENT, OutsideLeases, ledger_of, unlent_of
from rose_core.accounting.ledger import GpuTier, Ledger, ServingImpact, allowed_hundredths, total
from rose_core.accounting.statement import CostStatement, statement
from rose_core.api import RolloutLease, ServingPool
from rose_core.api.servingpool import revenue_of

_FREE: Final = Prices(0, 0)
_NOTHING_OUTSIDE: Final[Mapping[str, OutsideLeases]] = {}


@dataclass(frozen=True)
class Usage:
    """One lease since it was made.

    Attributes:
        lease, pool: namespace and name; of several pools all names, because a lease's totals do not
            say which of them gave what.
        ledger: with what the trainer has told of it.
        prices: what it is charged; None where its pool is gone, and with it its price.
        tokens: by kind of engine and use, as its router and its trainer said.
        late: price of a late request, and where it comes from.
    """

    lease: str
    pool: str
    slots: int
    ledger: Ledger
    prices: Prices | None
    tokens: Sampled
    late: LatePrice
    beside: OutsideLeases = field(default_factory=OutsideLeases)

    @property
    def cost(self) -> Cost | None:
        """What it comes to, in micro-units."""
        return None if self.prices is None else cost(self.ledger, self.prices)


def usages(
    leases: Sequence[RolloutLease],
    pools: Mapping[str, ServingPool],
    asked: Prices = _FREE,
    beside: Mapping[str, OutsideLeases] = _NOTHING_OUTSIDE,
    *,
    price_violations: bool = False,
) -> list[Usage]:
    """Every lease, the largest use of GPUs first.

    Args:
        leases: of any namespace.
        pools: by namespace and name.
        asked: every price but that of a lent hour, which is the pool's.
        beside: by lease, what only the trainer knows.
        price_violations: a late request costs what its pool earns by one, or what its GPUs cost
            by the requests that they served
            (``accounting.late``), in place of the price asked.
    """
    found = [
        _usage(
            lease, pools, asked, beside.get(lease.metadata.key), price_violations=price_violations
        )
        for lease in leases
    ]
    return sorted(found, key=lambda one: (-one.ledger.borrowed.held_milliseconds, one.lease))


@dataclass(frozen=True)
class IdleReserve:
    """What a pool kept back while nobody borrowed, since it was made."""

    pool: str
    ledger: Ledger
    prices: Prices

    @property
    def cost(self) -> float:
        """What that comes to, in micro-units."""
        return cost(self.ledger, self.prices).total


def idle_reserves(pools: Mapping[str, ServingPool], asked: Prices = _FREE) -> list[IdleReserve]:
    """Of every pool that has kept some back, by name."""
    return [
        IdleReserve(key, unlent_of(unlent), asked)
        for key, pool in sorted(pools.items())
        if (unlent := pool.status.totals.unlent_reserved_milliseconds)
    ]


def _price(lease: RolloutLease, pools: Mapping[str, ServingPool]) -> int | None:
    """Of a lent hour; None where a pool is gone, or where its pools differ."""
    found = [pools.get(ref.key) for ref in lease.spec.pools]
    prices = {pool.spec.lending.price_per_gpu_hour_micros if pool else None for pool in found}
    return prices.pop() if len(prices) == 1 else None


def _usage(
    lease: RolloutLease,
    pools: Mapping[str, ServingPool],
    asked: Prices,
    outside: OutsideLeases | None,
    *,
    price_violations: bool,  # see ``usages``
) -> Usage:
    totals, beside = lease.status.totals, outside or OutsideLeases()
    # What was typed counts before what the lease's router was told.
    beside = replace(
        beside,
        accepted=beside.accepted or totals.accepted_trajectories,
        correct=beside.correct or totals.correct_answers,
    )
    used = ledger_of(
        totals.lent_milliseconds,
        totals.open_milliseconds,
        totals.harvested_tokens,
        beside,
        serving=ServingImpact(
            totals.serving_requests, totals.slo_violations, _allowed(lease, pools)
        ),
        weight_bytes=totals.weight_bytes,
        reserved_ms=totals.reserved_milliseconds,
    )
    price = _price(lease, pools)
    late = late_price(
        ServedTraffic(
            totals.serving_requests,
            used.borrowed.held_hours,
            totals.serving_input_tokens,
            totals.serving_output_tokens,
            totals.serving_requests_with_tokens,
        ),
        asked.dedicated_hour,
        revenue_of(pools.get(ref.key) for ref in lease.spec.pools),
        None if price_violations else asked.violation,
    )
    prices = None if price is None else replace(asked, lent_hour=price, violation=late.whole)
    return Usage(
        lease.metadata.key,
        ", ".join(ref.key for ref in lease.spec.pools),
        lease.status.slots_granted,
        used,
        prices,
        Sampled(
            {
                GpuTier.DEDICATED: totals.dedicated_tokens,
                GpuTier.BORROWED: totals.harvested_tokens,
            },
            totals.trained_tokens,
            totals.reasoning_tokens,
        ),
        late,
        beside,
    )


def _allowed(lease: RolloutLease, pools: Mapping[str, ServingPool]) -> int:
    """0, which is unknown, where a pool has no objective or its pools' percentiles differ."""
    found = [pools.get(ref.key) for ref in lease.spec.pools]
    shares = {pool.spec.slo.percentile if pool and pool.spec.slo else None for pool in found}
    percentile = shares.pop() if len(shares) == 1 else None
    if percentile is None:
        return 0
    return allowed_hundredths(lease.status.totals.serving_requests, percentile)


def statements(found: Sequence[Usage]) -> list[CostStatement]:
    """What each lease cost, in the order of their names; one without a price is left out."""
    return [
        statement(
            one.lease,
            one.ledger,
            one.prices,
            one.beside.dedicated_only,
            late_source=one.late.source,
        )
        for one in sorted(found, key=lambda one: one.lease)
        if one.prices is not None
    ]


def idle_statements(idle: Sequence[IdleReserve]) -> list[CostStatement]:
    """Pools' own lines, for a page."""
    return [statement(f"{one.pool} ({UNLENT})", one.ledger, one.prices) for one in idle]


def breakdowns(found: Sequence[Usage]) -> dict[str, CostBreakdown]:
    """By lease, its bill taken apart; one without a price, or without tokens trained on, has none.

    A lease whose pool says nothing of requests has no price of a late one.
    """
    return {
        one.lease: breakdown(one.ledger, one.prices, one.tokens, violation=one.late)
        for one in sorted(found, key=lambda one: one.lease)
        if one.prices is not None and one.tokens.trained
    }


def usage_rows(
    found: Sequence[Usage], idle: Sequence[IdleReserve] | None = None, *, made: bool = False
) -> list[Row]:
    """A row for each lease, and one below them for what each pool kept back beside its leases.

    Args:
        found: as ``usages`` gives them.
        idle: as ``idle_reserves`` gives them; None = not asked for, and no row says anything of it.
        made: also what only the trainer knows, and what follows from it.
    """
    rows: list[Row] = [
        {"lease": one.lease, "pool": one.pool, "slots": one.slots}
        | _figures([one], None if idle is None else ())
        | (_late(one) | _made([one]) | _compared(one) if made else {})
        for one in found
    ]
    unknown = {
        "late_request": None,
        "late_request_is": None,
        "saved": None,
        "break_even_lent_hour": None,
    }
    for own in idle or ():
        row = {"lease": UNLENT, "pool": own.pool, "slots": 0} | _figures([], [own])
        rows.append(row | (_made([]) | unknown if made else {}))
    return rows


def summed(
    found: Sequence[Usage], by: str, idle: Sequence[IdleReserve] = (), *, made: bool = False
) -> list[Row]:
    """A row for the leases of each ``pool`` or each ``namespace``, as ``by`` says.

    What a pool kept back while nobody borrowed is in its own row, and in that of its namespace.
    """
    groups: dict[str, list[Usage]] = defaultdict(list)
    kept: dict[str, list[IdleReserve]] = defaultdict(list)
    for one in found:
        groups[one.pool if by == "pool" else one.lease.split("/")[0]].append(one)
    for own in idle:
        kept[own.pool if by == "pool" else own.pool.split("/")[0]].append(own)
    return [
        {by: key, "leases": len(group), "slots": sum(one.slots for one in group)}
        | _figures(group, kept.get(key, ()))
        | (_made(group) if made else {})
        for key in sorted({*groups, *kept})
        for group in [groups.get(key, [])]
    ]


def _figures(group: Sequence[Usage], idle: Sequence[IdleReserve] | None) -> dict[str, object]:
    used = total(one.ledger for one in group)
    hours = used.borrowed.held_hours
    return {
        "gpu_hours": round(hours, 3),
        "open_gpu_hours": round(used.borrowed.computing_hours, 3),
        "reserved_gpu_hours": round(used.reserved_hours, 3),
        "tokens": used.tokens.produced,
        "tokens_per_gpu_hour": round(used.tokens.produced / hours) if hours else None,
        "weight_gb": round(used.weight_bytes / GIGABYTE, 3),
        "requests": used.serving.requests,
        "slo_violations": used.serving.added_violations,
        "slo_budget_used": _rounded(_budget_used(group), 4),
        "charge": _money(_charge(group)),
    } | ({} if idle is None else _left(idle))


def _left(idle: Sequence[IdleReserve]) -> dict[str, object]:
    """What is charged to nobody."""
    hours = total(one.ledger for one in idle).unlent_reserved_hours
    return {
        "unlent_reserved_gpu_hours": round(hours, 3),
        "left_with_pool": _money(sum(one.cost for one in idle)),
    }


def _budget_used(group: Sequence[Usage]) -> float | None:
    """Unknown when the SLO of any lease that was beside requests is."""
    parts = [one.ledger.serving for one in group if one.ledger.serving.requests]
    if any(part.allowed_hundredths == 0 for part in parts):
        return None
    return total(one.ledger for one in group).serving.budget_used


def _bills(group: Sequence[Usage]) -> list[Cost] | None:
    """Unknown when the price of any lease is."""
    known = [one.cost for one in group if one.cost is not None]
    return known if len(known) == len(group) else None


def _cost(group: Sequence[Usage]) -> float | None:
    bills = _bills(group)
    return None if bills is None else sum(bill.total for bill in bills)


def _charge(group: Sequence[Usage]) -> float | None:
    """What the pools' owners get: everything but the borrower's own GPUs."""
    bills = _bills(group)
    return None if bills is None else sum(bill.total - bill.dedicated for bill in bills)


def _late(one: Usage) -> dict[str, object]:
    """What a late request costs, and where that comes from."""
    return {"late_request": _money(one.late.micros), "late_request_is": one.late.source.value}


def _made(group: Sequence[Usage]) -> dict[str, object]:
    """What the trainer made of it; unknown what nobody has told."""
    used, bill = total(one.ledger for one in group), _cost(group)
    own_hours = used.dedicated.held_hours
    accepted, correct = used.trajectories.accepted, used.trajectories.correct
    return {
        "dedicated_gpu_hours": round(own_hours, 3),
        "cost": _money(bill),
        "accepted": accepted or None,
        "correct": correct or None,
        "cost_per_accepted": _per(bill, accepted),
        "cost_per_correct": _per(bill, correct),
    }


def _compared(one: Usage) -> dict[str, object]:
    """Against the same work without borrowing, where somebody has run it."""
    outside = statements([one])
    return {
        "saved": _rounded(outside[0].saved, 4) if outside else None,
        "break_even_lent_hour": _money(outside[0].break_even) if outside else None,
    }


def _per(micros: float | None, count: int) -> float | None:
    return None if micros is None or not count else _money(micros / count)


def _money(micros: float | None) -> float | None:
    return _rounded(None if micros is None else micros / MICRO, 6)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
