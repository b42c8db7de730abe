"""``rose report``: GPU time lent, tokens made, what it did and what it cost, for chargeback.

``--html`` adds a page with plots: the same statements as ``rose cost`` makes of a simulation, so
what was promised and what came of it can be laid side by side. Counts that only the trainer has
(``--accepted``, ``--correct``, ``--dedicated-gpu-hours``) are named with their lease.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.errors import NotFound
from rose_cli.ops.tables import output_flag, shown
from rose_cli.ops.top import pools_by_key
from rose_cli.ops.views import statements, summed, usage_rows
from rose_core.accounting.cost import Prices
from rose_core.accounting.leases import Beside
from rose_core.accounting.page import MICRO, html
from rose_core.accounting.statement import Statement
from rose_core.api import RolloutLease
from rose_wire.flags import amount


def main(argv: list[str]) -> int:
    """Print totals since each lease was made."""
    parser = argparse.ArgumentParser(
        "rose report", description=__doc__, parents=[connection_flags()]
    )
    parser.add_argument(
        "--by", choices=["lease", "pool", "namespace"], default="lease", help="a row for each"
    )
    parser.add_argument("--html", type=Path, help="write a page with plots there")
    for name, default, what in (
        ("dedicated-hour", 1.0, "price of a dedicated GPU-hour"),
        ("violation", 0.0, "the owner's price of a request late beside rollouts"),
        ("gigabyte", 0.0, "price of a gigabyte of weights"),
    ):
        parser.add_argument(f"--{name}", type=amount, default=default, help=what)
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
    if not lease or value < 0 or not math.isfinite(value):
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
    asked = Prices(
        dedicated_hour=round(given.dedicated_hour * MICRO),
        lent_hour=0,
        violation=round(given.violation * MICRO),
        gigabyte=round(given.gigabyte * MICRO),
    )
    rows = usage_rows(leases, pools, asked)
    beside = _beside(given)
    if unknown := sorted(beside.keys() - {lease.metadata.key for lease in leases}):
        message = f"no lease {', '.join(unknown)} {cluster.where}; name it as NAMESPACE/LEASE"
        raise NotFound(message)
    chosen = rows if given.by == "lease" else summed(rows, given.by)
    sys.stdout.write(shown(chosen, given.output, f"no leases {cluster.where}"))
    if given.html:
        _write_page(given.html, leases, statements(leases, pools, asked, beside))
    return 0


def _write_page(path: Path, leases: list[RolloutLease], told: list[Statement]) -> None:
    path.write_text(html(told))
    if left_out := len(leases) - len(told):
        sys.stderr.write(
            f"{left_out} of the leases are not on the page: their pool is gone, and with it its "
            "price\n"
        )
