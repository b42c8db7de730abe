"""``rose top``: who uses most: leases by GPU time, nodes by slots."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.tables import Row, output_flag, shown
from rose_cli.ops.usage import usage_rows, usages
from rose_core.api import Desired, RolloutLease, RolloutSlot, ServingPool
from rose_wire.flags import VerbParser, count


def main(argv: list[str]) -> int:
    """Print the largest users."""
    parser = VerbParser("rose top", description=__doc__, parents=[connection_flags()])
    parser.add_argument(
        "what", nargs="?", choices=["leases", "nodes"], default="leases", help="whose use"
    )
    parser.add_argument("--limit", type=count, default=20, help="rows; 0 for all")
    output_flag(parser)
    given = parser.parse_args(argv)
    return run("top", given, lambda cluster: _show(cluster, given))


def _show(cluster: Cluster, given: argparse.Namespace) -> int:
    rows = _rows(cluster, given.what)
    empty = "no slots" if given.what == "nodes" else f"no leases {cluster.where}"
    sys.stdout.write(shown(rows[: given.limit or None], given.output, empty))
    return 0


def _rows(cluster: Cluster, what: str) -> list[Row]:
    if what == "nodes":
        return node_rows(cluster.objects(RolloutSlot, everywhere=True))
    return usage_rows(usages(cluster.objects(RolloutLease), pools_by_key(cluster)))


def pools_by_key(cluster: Cluster) -> dict[str, ServingPool]:
    """Every pool: a lease may borrow from another namespace's."""
    return {pool.metadata.key: pool for pool in cluster.objects(ServingPool, everywhere=True)}


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


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
