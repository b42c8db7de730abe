"""``rose models``: which models lie on which nodes, and whose leases may name them.

The nodes' engine hosts look into their folders, the pools' statuses say what they found. Which
namespaces may lease a model is the TenantPolicies' word; who may not read them sees ``?``.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.errors import NotAllowed
from rose_cli.ops.tables import Row, output_flag, shown
from rose_core.api import ServingPool, TenantPolicy
from rose_core.api.poolstatus import PoolModel
from rose_wire.flags import VerbParser

_MOST_NAMESPACES = 4
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def main(argv: list[str]) -> int:
    """Print the models; exit code 1 when a pool lacks one on some of its nodes."""
    parser = VerbParser("rose models", description=__doc__, parents=[connection_flags()])
    parser.add_argument("model", nargs="?", default="*", help="only these, * for any characters")
    parser.add_argument("--nodes", action="store_true", help="a row per node instead of per pool")
    output_flag(parser)
    given = parser.parse_args(argv)
    return run("models", given, lambda cluster: _show(cluster, given))


def _show(cluster: Cluster, given: argparse.Namespace) -> int:
    pools = cluster.objects(ServingPool)
    try:
        policies: Sequence[TenantPolicy] | None = cluster.policies()
    except NotAllowed:
        policies = None
    found = [
        (pool, model)
        for pool in pools
        for model in pool.status.models
        if fnmatch.fnmatchcase(model.name, given.model)
    ]
    rows = node_rows(found) if given.nodes else model_rows(found, policies)
    empty = f"no models {cluster.where}: no engine host has reported one (lending.enabled)"
    sys.stdout.write(shown(rows, given.output, empty))
    return int(any(model.missing_nodes for _, model in found))


def model_rows(
    found: Sequence[tuple[ServingPool, PoolModel]], policies: Sequence[TenantPolicy] | None
) -> list[Row]:
    """One row per model, content and pool."""
    return [
        {
            "model": model.name,
            "size": size_text(model.size_bytes),
            "digest": model.digest,
            "pool": pool.metadata.key,
            "nodes": f"{len(model.nodes) + model.more_nodes} of "
            f"{len(model.nodes) + model.more_nodes + model.missing_nodes}",
            "leased by": borrowers(model.name, pool.metadata.key, policies),
        }
        for pool, model in found
    ]


def node_rows(found: Sequence[tuple[ServingPool, PoolModel]]) -> list[Row]:
    """One row per model, content and node."""
    return sorted(
        (
            {
                "model": model.name,
                "node": node,
                "size": size_text(model.size_bytes),
                "digest": model.digest,
                "pool": pool.metadata.key,
            }
            for pool, model in found
            for node in model.nodes
        ),
        key=lambda row: (row["model"], row["node"], row["pool"]),
    )


def borrowers(model: str, pool: str, policies: Sequence[TenantPolicy] | None) -> str:
    """Which namespaces may lease this model from this pool, as the policies write them."""
    if policies is None:
        return "?"
    names = sorted(
        {
            word
            for policy in policies
            if _any(policy.spec.models, model) and _any(policy.spec.pools, pool)
            for word in (
                *policy.spec.namespaces.names,
                *(f"{key}={value}" for key, value in policy.spec.namespaces.match_labels.items()),
            )
        }
    )
    more = f", and {len(names) - _MOST_NAMESPACES} more" if len(names) > _MOST_NAMESPACES else ""
    return ", ".join(names[:_MOST_NAMESPACES]) + more


def size_text(size: int) -> str:
    """``15.3 GiB``."""
    amount, unit = float(size), 0
    while amount >= _STEP and unit + 1 < len(_UNITS):
        amount, unit = amount / _STEP, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{size} B"


def _any(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
