"""``rose drain NODE``: free a node's GPUs of rollouts before somebody works on it.

It presses the stop button of the node's serving pods (the annotation that each agent reads from its
own watch of pods), so engines end even while the operator is away; serving is not touched. Then it
waits until no slot is left there. ``--undo`` releases the button. ``kubectl cordon`` frees a node
too, through the operator.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rose_cli.ops.cluster import Cluster, connection_flags, run, until
from rose_cli.ops.errors import NotFound
from rose_core.api import STOP_ANNOTATION, RolloutSlot, ServingPool
from rose_wire.flags import VerbParser, amount


def main(argv: list[str]) -> int:
    """Stop lending on a node, or allow it again."""
    parser = VerbParser(
        "rose drain", description=__doc__, parents=[connection_flags(namespaced=False)]
    )
    parser.add_argument("node", help="its name, as kubectl get nodes has it")
    parser.add_argument("--undo", action="store_true", help="lend there again")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the GPUs")
    parser.add_argument("--timeout", type=amount, default=120.0, help="seconds to wait")
    given = parser.parse_args(argv)
    return run("drain", given, lambda cluster: _drain(cluster, given))


def _drain(cluster: Cluster, given: argparse.Namespace) -> int:
    pools = cluster.objects(ServingPool, everywhere=True)
    found = cluster.pods_of(given.node)
    if not found:
        raise NotFound(f"no pod runs on {given.node}: is that its name? (kubectl get nodes)")
    serving = [pod for pod in found if _serves(pod, pools)]
    value = None if given.undo else "true"
    for pod in serving:
        metadata = pod["metadata"]
        cluster.annotate_pod(metadata["namespace"], metadata["name"], {STOP_ANNOTATION: value})
    done = "may be lent from again" if given.undo else "are stopped for rollouts"
    sys.stdout.write(f"{len(serving)} serving pods of {given.node} {done}\n")
    if not given.undo and not given.no_wait:
        _wait(cluster, given.node, given.timeout)
    return 0


def _serves(pod: dict[str, Any], pools: list[ServingPool]) -> bool:
    labels = (pod["metadata"].get("labels") or {}).items()
    return any(
        pool.metadata.namespace == pod["metadata"]["namespace"]
        and pool.spec.selector.match_labels.items() <= labels
        for pool in pools
    )


def _wait(cluster: Cluster, node: str, seconds: float) -> None:
    def vacated() -> bool:
        slots = cluster.objects(RolloutSlot, everywhere=True)
        return not any(slot.spec.member.node == node for slot in slots)

    until(
        vacated,
        seconds,
        f"slots are left on {node} after {seconds:.0f} s: does its agent run? "
        "(kubectl get pods -A -o wide -l app.kubernetes.io/name=rose-agent)",
    )
    sys.stdout.write(f"no slot is left on {node}\n")
