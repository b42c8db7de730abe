"""``rose status``: pools, leases and slots at one glance."""

from __future__ import annotations

import json
import sys

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.tables import output_flag, table
from rose_cli.ops.views import lease_rows, pool_rows, slot_summary
from rose_core.api import RolloutLease, RolloutSlot, ServingPool
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
