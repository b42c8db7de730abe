"""``rose report``: GPU time lent, tokens made, what it did and what it cost, for chargeback.

``--html`` adds a page with plots: the same statements as ``rose cost`` makes of a simulation, so
what was promised and what came of it can be laid side by side. Accepted trajectories and correct
answers are those that trainers report to their lease's router; ``--accepted`` and ``--correct``
count instead where they are given. What only the trainer knows (``--dedicated-gpu-hours``,
``--alone-gpu-hours``) is named with its lease. With any of it, and always in JSON and CSV, a row
says what an accepted trajectory cost. Below the table stands for each lease whose trainer reports
what a correct answer cost and what drives it; in JSON it is ``cost_correct``.

What a pool of the namespaces shown kept back of its GPUs' memory while nobody borrowed is charged
to no lease. It has a row of its own, *not lent*, with what that costs under ``left_with_pool``.
Charges, the borrowers' own GPUs and these are the whole bill (``-A``: of all namespaces).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.errors import NotFound
from rose_cli.ops.tables import output_flag, shown
from rose_cli.ops.top import pools_by_key
from rose_cli.ops.usage import (
    breakdowns,
    idle_reserves,
    idle_statements,
    statements,
    summed,
    usage_rows,
    usages,
)
from rose_core.accounting.breakdown import CostBreakdown, figures, lines
from rose_core.accounting.cost import MICRO, Prices
from rose_core.accounting.leases import OutsideLeases
from rose_core.accounting.statement import CostStatement
from rose_core.api import RolloutLease
from rose_simulate.pages.statement_page import html
from rose_wire.flags import VerbParser, amount

_HOUR_MS = 3_600_000
_LABELS = {
    "accepted": "trajectories trained on",
    "correct": "correct answers among them",
    "dedicated-gpu-hours": "held by dedicated engines beside the lease",
    "alone-gpu-hours": "that an accepted trajectory took without borrowing: says what was saved "
    "and the break-even price",
}


def main(argv: list[str]) -> int:
    """Print totals since each lease was made."""
    parser = VerbParser("rose report", description=__doc__, parents=[connection_flags()])
    parser.add_argument(
        "--by", choices=["lease", "pool", "namespace"], default="lease", help="a row for each"
    )
    parser.add_argument("--html", type=Path, help="write a page with plots there")
    for name, default, what in (
        ("dedicated-hour", 1.0, "price of a dedicated GPU-hour"),
        (
            "violation",
            None,
            "price of a request late beside rollouts; by default what its pool earns by one "
            "(spec.revenue), or what its GPUs cost by the requests that they served",
        ),
        ("gigabyte", 0.0, "price of a gigabyte of weights"),
        (
            "reserve",
            None,
            "price of all of a GPU's memory, kept back from serving for an hour; by default that "
            "of a dedicated GPU-hour, so that memory costs its share of the GPU",
        ),
    ):
        parser.add_argument(f"--{name}", type=amount, default=default, help=what)
    for name, what in _LABELS.items():
        parser.add_argument(
            f"--{name}", type=_named, nargs="+", default=[], metavar="LEASE=N", help=what
        )
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


def _beside(given: argparse.Namespace) -> dict[str, OutsideLeases]:
    accepted, correct = dict(given.accepted), dict(given.correct)
    hours, alone = dict(given.dedicated_gpu_hours), dict(given.alone_gpu_hours)
    return {
        lease: OutsideLeases(
            round(hours.get(lease, 0.0) * _HOUR_MS),
            round(accepted.get(lease, 0.0)),
            round(correct.get(lease, 0.0)),
            round(alone.get(lease, 0.0) * _HOUR_MS),
        )
        for lease in {*accepted, *correct, *hours, *alone}
    }


def _show(cluster: Cluster, given: argparse.Namespace) -> int:
    leases, pools = cluster.objects(RolloutLease), pools_by_key(cluster)
    asked, beside = _prices(given), _beside(given)
    if unknown := sorted(beside.keys() - {lease.metadata.key for lease in leases}):
        message = f"no lease {', '.join(unknown)} {cluster.where}; name it as NAMESPACE/LEASE"
        raise NotFound(message)
    found = usages(leases, pools, asked, beside, price_violations=given.violation is None)
    # Other namespaces' pools are asked for their prices alone.
    own = {k: p for k, p in pools.items() if cluster.namespace in {None, p.metadata.namespace}}
    idle = idle_reserves(own, asked)
    known = any(one.beside.accepted for one in found)
    made = bool(beside) or known or given.output != "table"
    by_lease = given.by == "lease"
    if by_lease:
        rows = usage_rows(found, idle, made=made)
    else:
        rows = summed(found, given.by, idle, made=made)
    parts = breakdowns(found)
    if by_lease and given.output == "json":
        apart = {name: figures(one) for name, one in parts.items()}
        rows = [{**row, "cost_correct": apart.get(str(row["lease"]))} for row in rows]
    sys.stdout.write(shown(rows, given.output, f"no leases {cluster.where}"))
    if by_lease and given.output == "table":
        sys.stdout.write("".join(_taken_apart(name, one) for name, one in parts.items()))
    if given.html:
        _write_page(given.html, len(leases), statements(found), idle_statements(idle), parts)
    return 0


def _prices(given: argparse.Namespace) -> Prices:
    """Every price that is asked; that of a lent hour is the pool's."""
    reserve = given.dedicated_hour if given.reserve is None else given.reserve
    return Prices(
        dedicated_hour=round(given.dedicated_hour * MICRO),
        lent_hour=0,
        violation=round((given.violation or 0.0) * MICRO),
        gigabyte=round(given.gigabyte * MICRO),
        reserve_hour=round(reserve * MICRO),
    )


def _taken_apart(lease: str, found: CostBreakdown) -> str:
    """A lease's bill and what drives it, as lines."""
    costs = lines(found)
    width = max(len(what) for what, _, _ in costs)
    body = "".join(
        f"  {what:<{width}}  {value:<16}  {of}".rstrip() + "\n" for what, value, of in costs
    )
    return f"\n{lease}\n{body}"


def _write_page(
    path: Path,
    leases: int,
    costs: list[CostStatement],
    idle: list[CostStatement],
    parts: Mapping[str, CostBreakdown],
) -> None:
    path.write_text(html([*costs, *idle], parts))
    if left_out := leases - len(costs):
        sys.stderr.write(
            f"{left_out} of the leases are not on the page: their pool is gone, and with it its "
            "price\n"
        )
