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
import random
import sys
import tempfile
import time
from pathlib import Path

from bench.operator.fleet import FULL, NAMESPACE, QUICK, SYSTEM, Scale
from bench.operator.machines import LEASE_SECONDS, STATUS_SECONDS, Machines
from bench.operator.processes import Agents, Operator, ended
from bench.record import Figure, figure, record
from rose_core.api.crd import KINDS
from rose_dev.api_client import ApiClient
from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.cluster.kwok import Kwok
from rose_dev.errors import StartFailed
from rose_dev.waiting import wait_for_answer
from rose_operator.kube.api import RESOURCES, ObjectKind

POOL = RESOURCES[ObjectKind.POOL]
_LEASE, _SLOT = RESOURCES[ObjectKind.LEASE], RESOURCES[ObjectKind.SLOT]


class Bench:
    """One run."""

    def __init__(
        self, scale: Scale, plane: ControlPlane, machines: Machines, client: ApiClient
    ) -> None:
        self.scale, self.plane, self.machines, self.client = scale, plane, machines, client
        self.first: Operator
        self.second: Operator
        self.agents: Agents
        self.figures: list[Figure] = []
        self.random = random.Random(1)

    def add(self, name: str, value: float, unit: str, at_most: float | None = None) -> None:
        """Keep and print a figure."""
        self.figures.append(figure(name, value, unit, at_most=at_most))
        print(f"  {name}: {value:.4g} {unit}", flush=True)

    def slots(self) -> dict[str, str]:
        """Slots by name -> uid."""
        found = (slot["metadata"] for slot in self.client.list(_SLOT, SYSTEM))
        return {metadata["name"]: metadata["uid"] for metadata in found}

    def fill(self) -> None:
        """All leases at once."""
        wanted = self.scale.fleet.leases * self.scale.fleet.slots_per_lease
        before = self.first.writes()
        started = time.monotonic()
        for manifest in self.scale.fleet.lease_manifests():
            self.client.create(_LEASE, manifest)
        self.add("fill: applying the leases", time.monotonic() - started, "s")
        wait_for_answer(
            lambda: len(self.agents.granted()) >= wanted, f"{wanted} slots are granted", 300
        )
        self.add("fill: first lease applied -> all granted", time.monotonic() - started, "s")
        self.settle()
        self.add("fill: writes per slot", (self.first.writes() - before) / wanted, "")

    def settle(self, seconds: float = 12.0, operator: Operator | None = None) -> None:
        """Until no write has happened for a while; of the first operator if no other is given."""
        leader = operator or self.first
        seen, since = leader.writes(), time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since
            now = leader.writes()
            if now != seen:
                seen, since = now, time.monotonic()
            return time.monotonic() - since > seconds

        # The page has thousands of series: looking at it all the time would be a load of its own.
        wait_for_answer(quiet, "the world is at rest", 300, pause=1.0)

    def rest(self) -> None:
        """Nothing changes."""
        seconds = self.scale.rest_seconds
        writes, cpu = self.first.writes(), self.first.cpu_seconds()
        syncs = sum(self.first.samples("rose_operator_syncs_total").values())
        time.sleep(seconds)
        syncs = sum(self.first.samples("rose_operator_syncs_total").values()) - syncs
        cpu = self.first.cpu_seconds() - cpu
        self.add("rest: writes", self.first.writes() - writes, "", at_most=0)
        self.add("rest: syncs per second", syncs / seconds, "1/s")
        self.add("rest: share of a core", cpu / seconds * 100, "%", at_most=30)

    def probes(self) -> None:
        """Single leases, each until a node holds its grant."""
        seconds = []
        for number in range(self.scale.probes):
            name = f"probe-{number}"
            pool = self.random.randrange(self.scale.fleet.pools)
            self.client.create(_LEASE, self.scale.fleet.lease(name, pool, 1))
            applied = time.monotonic()
            seconds.append(self._granted(name) - applied)
            time.sleep(self.random.random() * 0.5)
            self.client.delete(_LEASE, name, NAMESPACE)
        seconds.sort()
        self.add("lease applied -> grant, median", seconds[len(seconds) // 2], "s")
        p99 = seconds[min(len(seconds) - 1, round(len(seconds) * 0.99))]
        self.add("lease applied -> grant, p99", p99, "s", at_most=3)
        self.settle()

    def _granted(self, name: str) -> float:
        """When a node holds the lease's first grant.

        Raises:
            StartFailed: none does; says what the operator tells of the lease.
        """
        key = f"{NAMESPACE}/{name}"
        events = self.agents.events
        try:
            return wait_for_answer(
                lambda: next((e for e in reversed(events) if e.lease == key), None),
                f"lease {key} is granted",
            ).at
        except StartFailed as error:
            status = self.client.get(_LEASE, name, NAMESPACE).get("status")
            message = (
                f"{error}; its status: {status}; the operator's log ends: {self.first.log_tail()}"
            )
            raise StartFailed(message) from error

    def churn(self) -> None:
        """Leases change their size and serving pods are replaced."""
        fleet = self.scale.fleet
        before, plans = self.first.writes(), self.first.plans()
        work = self.first.plans("cpu_seconds")
        decisions = sum(self.first.samples("rose_planner_decisions_total").values())
        cpu, started = self.first.cpu_seconds(), time.monotonic()
        while time.monotonic() - started < self.scale.churn_seconds:
            name = f"grpo-{self.random.randrange(fleet.leases)}"
            slots = {"spec": {"slots": {"max": self.random.randint(1, fleet.slots_per_lease)}}}
            self.client.merge(_LEASE, name, slots, NAMESPACE)
            self.agents.replace(self.machines.replace())
            time.sleep(0.5)
        share = (self.first.cpu_seconds() - cpu) / (time.monotonic() - started) * 100
        self.add("churn: share of a core", share, "%")
        self.settle()
        changed = sum(self.first.samples("rose_planner_decisions_total").values()) - decisions
        self.add("churn: slots made or taken back", changed, "")
        per_transition = (self.first.writes() - before) / max(1, 2 * changed)
        self.add("churn: writes per slot transition", per_transition, "", at_most=2)
        passes = self.first.plans().since(plans)
        self.add("time to plan, median at most", passes.at_most(50), "s")
        spent = self.first.plans("cpu_seconds").since(work)
        self.add("processor time to plan, p99 at most", spent.at_most(99), "s", at_most=1)
        p99 = passes.at_most(99)
        self.add("time to plan, p99 at most", p99, "s", at_most=1)

    def cordon(self) -> None:
        """Some nodes are about to be drained: their slots move, nobody else's."""
        held = self.agents.granted()
        nodes = sorted({event.node for event in held.values()})[: self.scale.fleet.nodes // 20]
        staying = {name for name, event in held.items() if event.node not in nodes}
        before = self.first.writes()
        started = time.monotonic()
        self.machines.cordon(nodes, cordoned=True)
        wait_for_answer(
            lambda: not {event.node for event in self.agents.granted().values()} & set(nodes),
            "no cordoned node holds a grant",
        )
        self.add("cordon: first cordon -> every slot back", time.monotonic() - started, "s")
        self.settle()
        self.add("cordon: slots taken back", len(held) - len(staying), "")
        lost = len(staying - self.agents.granted().keys())
        self.add("cordon: slots of other nodes lost", lost, "", at_most=0)
        moved = max(1, 4 * (len(held) - len(staying)))
        self.add("cordon: writes per slot transition", (self.first.writes() - before) / moved, "")
        self.machines.cordon(nodes, cordoned=False)
        self.settle()

    def poison(self) -> None:
        """Many leases that cannot be served."""
        count, before, writes = self.scale.poison, self.slots(), self.first.writes()
        started = time.monotonic()
        for number in range(count):
            self.client.create(_LEASE, self.scale.fleet.poison(number))

        def reasons() -> bool:
            found = self.client.list(_LEASE, NAMESPACE)
            failed = [one for one in found if one.get("status")]
            return count == sum("poison-" in one["metadata"]["name"] for one in failed)

        wait_for_answer(reasons, f"{count} poison leases have their reasons", 300, pause=1.0)
        self.add("poison: applied first -> last has its reason", time.monotonic() - started, "s")
        self.settle()
        self.add("poison: writes per lease", (self.first.writes() - writes) / count, "")
        changed = len(before.items() ^ self.slots().items())
        self.add("poison: slots changed", changed, "", at_most=0)

    def failover(self) -> None:
        """The leader dies; what the agents hold and what the API server has must stay."""
        before, held = self.slots(), set(self.agents.granted())
        self.first.dump_profile()
        peak = self.first.peak_bytes()
        self.add("resident memory, peak", peak / 2**20, "MiB", at_most=400)
        lapses = sum(self.first.samples("rose_operator_lead_lapses_total").values())
        self.add("times the lead lapsed", lapses, "", at_most=0)
        killed = time.monotonic()
        self.first.kill()
        wait_for_answer(self.second.leads, "the second operator leads")
        self.add("failover: killed -> second leads", time.monotonic() - killed, "s")
        nodes = {self.agents.granted()[slot].node for slot in held}

        def renewed() -> bool:
            reported = {
                e.node for e in list(self.agents.events) if e.what == "term" and e.at > killed
            }
            return nodes <= reported

        wait_for_answer(renewed, "every node with a grant obeys the second operator")
        self.add("failover: killed -> all grants renewed", time.monotonic() - killed, "s")
        time.sleep(15)  # the second operator plans by then
        lapsed = self.agents.count("lapsed", since=killed)
        self.add("failover: grants that lapsed", lapsed, "", at_most=0)
        after = self.slots()
        self.add("failover: slots lost", len(before.items() - after.items()), "", at_most=0)
        self.add("failover: slots doubled", len(after.items() - before.items()), "", at_most=0)
        self.add("failover: writes of the second", self.second.writes(), "", at_most=0)

    def outage(self) -> None:
        """The API server is away for longer than the leader Lease lasts."""
        before, stopped = self.slots(), time.monotonic()
        self.plane.stop_api_server()
        try:
            wait_for_answer(
                lambda: self.second.page("/readyz").strip() == "Offline", "the lead has lapsed", 60
            )
        finally:
            self.plane.start_api_server()
        returned, writes = time.monotonic(), self.second.writes()
        self.add("outage: the API server was away", returned - stopped, "s")
        wait_for_answer(self.second.leads, "the operator leads again")
        self.add("outage: returned -> leads again", time.monotonic() - returned, "s")
        self.settle(20.0, self.second)
        lapsed = self.agents.count("lapsed", since=stopped)
        self.add("outage: grants that lapsed", lapsed, "", at_most=0)
        after = self.slots()
        self.add("outage: slots lost", len(before.items() - after.items()), "", at_most=0)
        self.add("outage: slots doubled", len(after.items() - before.items()), "", at_most=0)
        self.add("outage: writes afterwards", self.second.writes() - writes, "", at_most=0)

    def run(self) -> None:
        """All phases."""
        wait_for_answer(self._all_dialled, f"{self.scale.fleet.nodes} agents have dialled in")
        for phase in (
            self.fill,
            self.rest,
            self.probes,
            self.churn,
            self.cordon,
            self.poison,
            self.failover,
            self.outage,
        ):
            print(f"{phase.__name__}:", flush=True)
            phase()

    def _all_dialled(self) -> bool:
        reported = {event.node for event in list(self.agents.events) if event.what == "term"}
        listening = self.first.samples("rose_operator_listening_agents ")
        return bool(listening) and len(reported) >= self.scale.fleet.nodes


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
