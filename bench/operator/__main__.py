"""``python -m bench.operator``: the operator's figures at fleet scale.

| phase | what happens | figures |
|---|---|---|
| fill | all leases are applied at once | time until every slot is granted |
| rest | nothing changes, agents renew | writes, share of a core |
| probes | single leases are applied | applied -> grant on a node |
| churn | leases are resized, serving pods replaced | writes per transition, time to plan |
| cordon | a twentieth of the nodes is cordoned | time until their slots are back, slots of others |
| poison | leases that are contradictory in five ways | time until each has its reason, slots |
| failover | the leader is killed with -9, a second operator takes over | slots, grants, time |
| outage | the API server is killed and started again | slots, grants, writes afterwards |

Nodes and serving pods are objects of the API server whose kubelets KWOK plays (``machines``).
A slot's life has four transitions: made, running, taken back, gone. Every write counts but those of
the leader Lease: specs, statuses, routers, Events.
"""

from __future__ import annotations

import argparse
import os
import pstats
import sys
import tempfile
import time
from pathlib import Path

from bench.operator.fleet import FULL, NAMESPACE, QUICK, SYSTEM, Scale
from bench.operator.machines import LEASE_SECONDS, STATUS_SECONDS, Machines
from bench.operator.phases import POOL, Bench
from bench.operator.processes import Agents, Operator, ended
from bench.record import Figure, record
from rose_core.api.crd import KINDS
from rose_dev.api_client import ApiClient
from rose_dev.control_plane import ControlPlane
from rose_dev.kwok import Kwok
from rose_dev.waiting import wait_for_answer

ROOT = Path(__file__).parents[2]


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.operator", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the fleet")
    parser.add_argument(
        "--any-core", action="store_true", help="do not bind the operator to a core"
    )
    parser.add_argument(
        "--profile", type=Path, help="where the leader's processor time goes, for pstats"
    )
    return parser


def run(
    scale: Scale, core: int | None, profile: Path | None = None
) -> tuple[list[Figure], list[str]]:
    """All phases against an API server of our own."""
    kubelets = {"status_seconds": STATUS_SECONDS, "lease_seconds": LEASE_SECONDS}
    with (
        ControlPlane() as plane,
        tempfile.TemporaryDirectory() as place,
        Kwok(plane, **kubelets),
        ApiClient(plane.kubeconfig) as client,
    ):
        folder = Path(place)
        bench = _prepared(scale, plane, client)
        bench.first = Operator("first", plane.kubeconfig, folder, core, profile)
        with ended(bench.first):
            wait_for_answer(bench.first.leads, "the first operator leads")
            bench.second = Operator("second", plane.kubeconfig, folder, core)
            with ended(bench.second):
                addresses = [f"127.0.0.1:{one.sync_port}" for one in (bench.first, bench.second)]
                bench.agents = Agents(scale.fleet, addresses, folder, bench.machines.pods)
                try:
                    bench.run()
                finally:
                    bench.agents.stop()
        return bench.figures, [_shape(scale, core)]


def _prepared(scale: Scale, plane: ControlPlane, client: ApiClient) -> Bench:
    """Kinds, namespaces, nodes, pods and pools."""
    crds = (f"--filename={ROOT / 'crds' / kind.plural}.yaml" for kind in KINDS)
    plane.kubectl("apply", *crds)
    named = (f"crd/{kind.full_name}" for kind in KINDS)
    plane.kubectl("wait", "--for=condition=Established", *named)
    for name in (NAMESPACE, SYSTEM):
        plane.kubectl("create", "namespace", name)
    machines = Machines(client, scale.fleet)
    started = time.monotonic()
    machines.build()
    took = time.monotonic() - started
    print(f"{scale.fleet.nodes} nodes, {len(machines.pods)} pods stand: {took:.0f} s", flush=True)
    for manifest in scale.fleet.pool_manifests():
        client.create(POOL, manifest)
    return Bench(scale, plane, machines, client)


def _shape(scale: Scale, core: int | None) -> str:
    fleet = scale.fleet
    bound = "any core" if core is None else f"core {core}, which other processes may use too"
    return (
        f"{fleet.nodes} nodes, {fleet.gpus} GPUs, {fleet.replicas} serving replicas in "
        f"{fleet.pools} pools, {fleet.leases} leases of {fleet.slots_per_lease} slots; "
        f"nodes and pods kept by KWOK; both operators on {bound}; API server, etcd, KWOK and "
        "agents on the same machine"
    )


def main() -> int:
    """Measure and report."""
    given = flags().parse_args()
    core = None if given.any_core else max(os.sched_getaffinity(0))
    figures, notes = run(QUICK if given.quick else FULL, core, given.profile)
    if given.profile is not None:
        pstats.Stats(str(given.profile)).sort_stats("cumulative").print_stats(40)
        return 0  # a profiler's figures are no figures
    record("operator-quick" if given.quick else "operator", figures, notes=notes)
    return 0 if all(one.met is not False for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
