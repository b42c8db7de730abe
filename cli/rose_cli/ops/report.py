"""``rose report``: GPU time lent, tokens made and what they cost, for books and chargeback."""

from __future__ import annotations

import argparse
import sys

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.tables import output_flag, shown
from rose_cli.ops.top import pools_by_key
from rose_cli.ops.views import summed, usage_rows
from rose_core.api import RolloutLease


def main(argv: list[str]) -> int:
    """Print totals since each lease was made."""
    parser = argparse.ArgumentParser(
        "rose report", description=__doc__, parents=[connection_flags()]
    )
    parser.add_argument("--by", choices=["lease", "pool", "namespace"], default="lease")
    output_flag(parser)
    given = parser.parse_args(argv)
    return run("report", given, lambda cluster: _show(cluster, given))


def _show(cluster: Cluster, given: argparse.Namespace) -> int:
    rows = usage_rows(cluster.objects(RolloutLease), pools_by_key(cluster))
    chosen = rows if given.by == "lease" else summed(rows, given.by)
    sys.stdout.write(shown(chosen, given.output, f"no leases {cluster.where}"))
    return 0
