"""``rose top``: who uses most: leases by GPU time, nodes by slots."""

from __future__ import annotations

import argparse
import sys

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.tables import Row, output_flag, shown
from rose_cli.ops.usage import usage_rows, usages
from rose_cli.ops.views import node_rows
from rose_core.api import RolloutLease, RolloutSlot, ServingPool
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
