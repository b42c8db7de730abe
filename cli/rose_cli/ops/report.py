"""``rose report``: GPU time lent, tokens made and what they cost, for books and chargeback.

``--html`` adds a page with plots: the same statements as ``rose cost`` makes of a simulation, so
what was promised and what came of it can be laid side by side. Counts that only the trainer has
(``--accepted``, ``--correct``, ``--dedicated-gpu-hours``) are named with their lease.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.tables import output_flag, shown
from rose_cli.ops.top import pools_by_key
from rose_cli.ops.views import statements, summed, usage_rows
from rose_core.accounting.leases import Beside
from rose_core.accounting.page import MICRO, html
from rose_core.api import RolloutLease


def main(argv: list[str]) -> int:
    """Print totals since each lease was made."""
    parser = argparse.ArgumentParser(
        "rose report", description=__doc__, parents=[connection_flags()]
    )
    parser.add_argument("--by", choices=["lease", "pool", "namespace"], default="lease")
    parser.add_argument("--html", type=Path, help="write a page with plots there")
    parser.add_argument("--dedicated-hour", type=float, default=1.0, help="price of a GPU-hour")
    for name in ("accepted", "correct", "dedicated-gpu-hours"):
        parser.add_argument(f"--{name}", type=_named, nargs="+", default=[], metavar="LEASE=N")
    output_flag(parser)
    given = parser.parse_args(argv)
    return run("report", given, lambda cluster: _show(cluster, given))


def _named(text: str) -> tuple[str, float]:
    lease, _, count = text.rpartition("=")
    try:
        value = float(count)
    except ValueError:
        value = -1.0
    if not lease or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAMESPACE/LEASE=NUMBER")
    return lease, value


def _beside(given: argparse.Namespace) -> dict[str, Beside]:
    accepted, correct = dict(given.accepted), dict(given.correct)
    hours = dict(given.dedicated_gpu_hours)
    return {
        lease: Beside(
            round(hours.get(lease, 0.0) * 3_600_000),
            round(accepted.get(lease, 0.0)),
            round(correct.get(lease, 0.0)),
        )
        for lease in {*accepted, *correct, *hours}
    }


def _show(cluster: Cluster, given: argparse.Namespace) -> int:
    leases, pools = cluster.objects(RolloutLease), pools_by_key(cluster)
    rows = usage_rows(leases, pools)
    chosen = rows if given.by == "lease" else summed(rows, given.by)
    sys.stdout.write(shown(chosen, given.output, f"no leases {cluster.where}"))
    if given.html:
        price = round(given.dedicated_hour * MICRO)
        given.html.write_text(html(statements(leases, pools, price, _beside(given))))
    return 0
