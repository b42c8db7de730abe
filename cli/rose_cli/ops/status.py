"""``rose status``: pools, leases and slots at one glance."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.tables import Row, output_flag, table
from rose_core.api import (
    Condition,
    ConditionType,
    Desired,
    RolloutLease,
    RolloutSlot,
    ServingPool,
)
from rose_core.api.conditions import find
from rose_wire.flags import VerbParser


def main(argv: list[str]) -> int:
    """Print what there is; exit code 1 when a lease or pool is not Ready."""
    parser = VerbParser("rose status", description=__doc__, parents=[connection_flags()])
    output_flag(parser, one_table=False)
    given = parser.parse_args(argv)
    return run("status", given, lambda cluster: _show(cluster, given.output))


def _show(cluster: Cluster, how: str) -> int:
    pools, leases = (
        pool_rows(cluster.objects(ServingPool)),
        lease_rows(cluster.objects(RolloutLease)),
    )
    slots = [
        slot
        for slot in cluster.objects(RolloutSlot, everywhere=True)
        if cluster.namespace in {None, slot.spec.lease_ref.namespace}
    ]
    if how == "json":
        sys.stdout.write(json.dumps({"pools": pools, "leases": leases}, indent=2) + "\n")
    else:
        sys.stdout.write(table(pools, f"no pools {cluster.where}") + "\n")
        sys.stdout.write(table(leases, f"no leases {cluster.where}") + "\n")
        sys.stdout.write(slot_summary(slots) + "\n")
    return int(any(row["ready"] != "True" for row in [*pools, *leases]))


def _condition(conditions: Iterable[Condition], kind: ConditionType) -> tuple[str, str]:
    """Status and reason, empty while nobody has said anything."""
    found = find(conditions, kind)
    return (found.status, found.reason) if found else ("", "")


def pool_rows(pools: Sequence[ServingPool]) -> list[Row]:
    """One row per pool."""
    rows: list[Row] = []
    for pool in pools:
        ready, reason = _condition(pool.status.conditions, ConditionType.READY)
        protected, _ = _condition(pool.status.conditions, ConditionType.SERVING_PROTECTED)
        certified, _ = _condition(pool.status.conditions, ConditionType.LENDING_CERTIFIED)
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
        ready, reason = _condition(lease.status.conditions, ConditionType.READY)
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


def slot_summary(slots: Sequence[RolloutSlot]) -> str:
    """How many slots are in which state, in one line."""
    counts = Counter(
        "Released" if slot.spec.desired is Desired.RELEASED else slot.status.state or "Starting"
        for slot in slots
    )
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    number = f"{len(slots)} slot{'' if len(slots) == 1 else 's'}"
    return f"{number}: {states}" if slots else "no slots"
