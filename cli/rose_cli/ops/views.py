"""Objects -> rows, pure: what ``status``, ``top`` and ``report`` say.

Money is what the pool's ``pricePerGPUHourMicros`` charges for GPU time in which rollouts could
compute (``rose_core.accounting``), and what is asked for violations and moved weights; time under a
grant with a shut gate costs nothing. Unknown figures are empty, never zero.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rose_cli.ops.tables import Row
from rose_core.accounting.cost import Prices, cost
from rose_core.accounting.leases import Beside, ledger_of
from rose_core.accounting.ledger import Ledger, ServingImpact
from rose_core.accounting.page import GIGABYTE
from rose_core.accounting.statement import Statement, statement
from rose_core.api import (
    Condition,
    ConditionType,
    Desired,
    RolloutLease,
    RolloutSlot,
    ServingPool,
)
from rose_core.api.conditions import find

_MILLISECONDS_PER_HOUR = 3_600_000
_MICROS = 1_000_000
_FREE = Prices(0, 0)


def condition(conditions: Iterable[Condition], kind: ConditionType) -> tuple[str, str]:
    """Status and reason, empty while nobody has said anything."""
    found = find(conditions, kind)
    return (found.status, found.reason) if found else ("", "")


def pool_rows(pools: Sequence[ServingPool]) -> list[Row]:
    """One row per pool."""
    rows: list[Row] = []
    for pool in pools:
        ready, reason = condition(pool.status.conditions, ConditionType.READY)
        protected, _ = condition(pool.status.conditions, ConditionType.SERVING_PROTECTED)
        rows.append(
            {
                "pool": pool.metadata.key,
                "mode": pool.spec.mode.value,
                "pods": pool.status.replicas,
                "qualified": pool.status.qualified_replicas,
                "lent": pool.status.lent_replicas,
                "protected": protected,
                "ready": ready,
                "reason": reason,
            }
        )
    return rows


def lease_rows(leases: Sequence[RolloutLease]) -> list[Row]:
    """One row per lease."""
    rows: list[Row] = []
    for lease in leases:
        ready, reason = condition(lease.status.conditions, ConditionType.READY)
        rows.append(
            {
                "lease": lease.metadata.key,
                "pool": lease.spec.pool_ref.key,
                "wanted": lease.spec.slots.max,
                "granted": lease.status.slots_granted,
                "running": lease.status.slots_ready,
                "version": lease.status.weight_version,
                "ready": ready,
                "reason": reason,
            }
        )
    return rows


def usage_rows(
    leases: Sequence[RolloutLease], pools: Mapping[str, ServingPool], asked: Prices = _FREE
) -> list[Row]:
    """What each lease has used since it was made, the largest use first.

    Args:
        leases: of any namespace.
        pools: by namespace and name; a lease whose pool is gone has no charge.
        asked: what is charged beside the pool's price of a lent hour.
    """
    rows = [_usage(lease, pools.get(lease.spec.pool_ref.key), asked) for lease in leases]
    return sorted(rows, key=lambda row: (-_number(row["gpu_hours"]), str(row["lease"])))


def _usage(lease: RolloutLease, pool: ServingPool | None, asked: Prices) -> Row:
    totals, used = lease.status.totals, _used(lease)
    hours = used.borrowed.held_milliseconds / _MILLISECONDS_PER_HOUR
    opened = used.borrowed.computing_milliseconds / _MILLISECONDS_PER_HOUR
    price = pool.spec.lending.price_per_gpu_hour_micros if pool else None
    prices = None if price is None else replace(asked, dedicated_hour=0, lent_hour=price)
    charge = None if prices is None else cost(used, prices).total
    return {
        "lease": lease.metadata.key,
        "pool": lease.spec.pool_ref.key,
        "slots": lease.status.slots_granted,
        "gpu_hours": round(hours, 3),
        "open_gpu_hours": round(opened, 3),
        "tokens": totals.harvested_tokens,
        "tokens_per_gpu_hour": round(totals.harvested_tokens / hours) if hours else None,
        "weight_gb": round(used.weight_bytes / GIGABYTE, 3),
        "requests": used.serving.requests,
        "slo_violations": used.serving.added_violations,
        "charge": None if charge is None else round(charge / _MICROS, 6),
    }


def _used(lease: RolloutLease, beside: Beside | None = None) -> Ledger:
    totals = lease.status.totals
    return ledger_of(
        totals.lent_milliseconds,
        totals.open_milliseconds,
        totals.harvested_tokens,
        beside,
        serving=ServingImpact(totals.serving_requests, totals.slo_violations),
        weight_bytes=totals.weight_bytes,
    )


def statements(
    leases: Sequence[RolloutLease],
    pools: Mapping[str, ServingPool],
    asked: Prices,
    beside: Mapping[str, Beside],
) -> list[Statement]:
    """What each lease cost at its pool's price, in the order of their names.

    Args:
        leases: of any namespace.
        pools: by namespace and name; a lease whose pool is gone is left out.
        asked: every price but that of a lent hour, which is the pool's.
        beside: by lease, what only the trainer knows.
    """
    found = []
    for lease in sorted(leases, key=lambda lease: lease.metadata.key):
        key, pool = lease.metadata.key, pools.get(lease.spec.pool_ref.key)
        price = pool.spec.lending.price_per_gpu_hour_micros if pool else None
        if price is not None:
            prices = replace(asked, lent_hour=price)
            found.append(statement(key, _used(lease, beside.get(key)), prices))
    return found


def summed(rows: Sequence[Row], by: str) -> list[Row]:
    """Usage of several leases together, by pool or by namespace of the lease."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        key = str(row["pool"] if by == "pool" else str(row["lease"]).split("/")[0])
        groups[key].append(row)
    return [_sum(by, key, group) for key, group in sorted(groups.items())]


def _sum(by: str, key: str, group: Sequence[Row]) -> Row:
    hours = sum(_number(row["gpu_hours"]) for row in group)
    tokens = sum(_number(row["tokens"]) for row in group)
    known = [row["charge"] for row in group if row["charge"] is not None]
    return {
        by: key,
        "leases": len(group),
        "slots": round(sum(_number(row["slots"]) for row in group)),
        "gpu_hours": round(hours, 3),
        "open_gpu_hours": round(sum(_number(row["open_gpu_hours"]) for row in group), 3),
        "tokens": round(tokens),
        "tokens_per_gpu_hour": round(tokens / hours) if hours else None,
        "weight_gb": round(sum(_number(row["weight_gb"]) for row in group), 3),
        "requests": round(sum(_number(row["requests"]) for row in group)),
        "slo_violations": round(sum(_number(row["slo_violations"]) for row in group)),
        "charge": round(sum(map(_number, known)), 6) if len(known) == len(group) else None,
    }


def node_rows(slots: Sequence[RolloutSlot]) -> list[Row]:
    """Slots by node, the fullest first."""
    by_node: dict[str, list[RolloutSlot]] = defaultdict(list)
    for slot in slots:
        by_node[slot.spec.member.node].append(slot)
    rows: list[Row] = [
        {
            "node": node,
            "slots": len(found),
            "running": sum(slot.status.state == "Running" for slot in found),
            "leaving": sum(slot.spec.desired is Desired.RELEASED for slot in found),
            "reclaims": sum(slot.status.reclaims for slot in found),
        }
        for node, found in by_node.items()
    ]
    return sorted(rows, key=lambda row: (-_number(row["slots"]), str(row["node"])))


def slot_summary(slots: Sequence[RolloutSlot]) -> str:
    """How many slots are in which state, in one line."""
    counts = Counter(
        "Released" if slot.spec.desired is Desired.RELEASED else slot.status.state or "Starting"
        for slot in slots
    )
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    number = f"{len(slots)} slot{'' if len(slots) == 1 else 's'}"
    return f"{number}: {states}" if slots else "no slots"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
