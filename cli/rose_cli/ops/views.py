"""Objects -> rows, pure: what ``status`` and ``top nodes`` say; ``usage`` has what leases used."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rose_cli.ops.tables import Row
from rose_core.api import (
    Condition,
    ConditionType,
    Desired,
    RolloutLease,
    RolloutSlot,
    ServingPool,
)
from rose_core.api.conditions import find


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
        certified, _ = condition(pool.status.conditions, ConditionType.LENDING_CERTIFIED)
        rows.append(
            {
                "pool": pool.metadata.key,
                "mode": pool.spec.mode.value,
                "pods": pool.status.replicas,
                "qualified": pool.status.qualified_replicas,
                "lent": pool.status.lent_replicas,
                "protected": protected,
                "certified": certified,
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
