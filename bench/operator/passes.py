"""``python -m bench.operator.passes``: processor time of one pass, without network or API server.

| pass | what has happened since the one before |
|---|---|
| first | everything is new |
| at rest | every agent has reported again, with other figures and nothing that matters |
| one change | a fifth of the agents have reported, a serving pod is new, a lease was resized |

A pass spends this between two ``await``; ``bench.operator`` measures the same on a real API server.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.operator.agents import Agent
from bench.operator.fleet import FULL, QUICK, SYSTEM, Fleet
from bench.record import Figure, figure, record
from rose_core.identity import SlotKey
from rose_core.lending import PlannerPolicy
from rose_core.wire.sync import SlotReport, SlotState
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import ObjectCache, Raw, key_of
from rose_operator.plan.telemetry import NodeTelemetry
from rose_operator.reconcile import Reconciler
from rose_operator.settings import Settings

_EPOCH = 1_800_000_000.0
_CREATED = "2027-01-15T07:00:00Z"
_KINDS = (
    ObjectKind.POOL,
    ObjectKind.LEASE,
    ObjectKind.SLOT,
    ObjectKind.DEPLOYMENT,
    ObjectKind.SERVICE,
)


class MemoryApi:
    """Takes every write and gives it a version; Events are counted."""

    namespace = SYSTEM

    def __init__(self) -> None:
        self.writes = 0
        self._objects: dict[tuple[ObjectKind, str], Raw] = {}
        self._version = 0

    async def apply(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Make or change an object's spec."""
        return self.put(kind, manifest)

    async def apply_status(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Change an object's status."""
        self.writes += 1
        return self._keep(kind, self._objects[kind, key_of(manifest)], manifest)

    async def create(self, _kind: ObjectKind, manifest: Raw) -> Raw:
        """Events."""
        self.writes += 1
        return manifest

    async def delete(self, kind: ObjectKind, name: str) -> None:
        """Gone at once."""
        self.writes += 1
        self._objects.pop((kind, f"{SYSTEM}/{name}"), None)

    def put(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Make or change an object's spec."""
        self.writes += 1
        key = kind, key_of(manifest)
        known = self._objects.get(key) or {"metadata": {"generation": 0}}
        made = self._keep(kind, known, manifest)
        made["metadata"]["generation"] += known.get("spec") != manifest.get("spec")
        return made

    def _keep(self, kind: ObjectKind, known: Raw, manifest: Raw) -> Raw:
        self._version += 1
        key = key_of(manifest)
        metadata = {"uid": f"uid-{self._version}", "creationTimestamp": _CREATED}
        metadata |= known["metadata"] | manifest["metadata"]
        metadata["resourceVersion"] = str(self._version)
        made = known | manifest | {"metadata": metadata}
        if kind is ObjectKind.DEPLOYMENT:
            made["status"] = {"readyReplicas": 1}
        self._objects[kind, key] = made
        return made


class Inside:
    """The reconciler of a fleet that reports, on an API server in memory, which validates nothing.

    ``now`` is the clock of everything. ``bench.operator`` runs on a real API server.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.now = 0.0
        self.fleet = fleet
        self.api = MemoryApi()
        self.stores = {kind: ObjectCache() for kind in ObjectKind}
        self.telemetry = NodeTelemetry(self.now)
        self.random = random.Random(1)
        self.agents = {
            node: Agent(node, replicas, [], lambda _: None, seed)
            for seed, (node, replicas) in enumerate(fleet.nodes_by_name().items())
        }
        self.reconciler = Reconciler(
            _settings(),
            self.api,
            self.stores,
            self.telemetry,
            may_write=lambda: True,
            clock=lambda: self.now,
            wall=lambda: _EPOCH + self.now,
            policy=replace(PlannerPolicy(), settle_seconds=0.0, toggle_seconds=0.0),
        )
        for kind in _KINDS:
            self.stores[kind].replace((), 0)
        for manifest in fleet.pool_manifests():
            self.put(ObjectKind.POOL, manifest)
        for manifest in fleet.lease_manifests():
            self.put(ObjectKind.LEASE, manifest)

    def put(self, kind: ObjectKind, manifest: Raw) -> None:
        """A user applies an object and the watch tells it."""
        self.stores[kind].put(self.api.put(kind, manifest))

    def report(self, nodes: Iterable[str] | None = None) -> None:
        """Agents report (all of them by default); every slot that is lent runs."""
        running = self._running()
        for node in self.agents if nodes is None else nodes:
            sent = msgspec.structs.replace(
                self.agents[node].request(), slots=tuple(running.get(node, ()))
            )
            self.telemetry.record(sent, self.now)

    def _running(self) -> dict[str, list[SlotReport]]:
        found: dict[str, list[SlotReport]] = defaultdict(list)
        for raw in self.stores[ObjectKind.SLOT].all():
            if raw["spec"]["desired"] == "Lent":
                found[raw["spec"]["members"][0]["node"]].append(_runs(raw))
        return found

    async def settle(self, most: int = 60) -> int:
        """Passes until nothing is written any more; how many.

        Raises:
            RuntimeError: it does not come to rest.
        """
        quiet = 0
        for number in range(most):
            writes = self.api.writes
            self.now += 5.0
            self.report()
            await self.reconciler.run_pass()
            quiet = quiet + 1 if self.api.writes == writes else 0
            if quiet > 3:  # what waits to be joined has been written
                return number
        raise RuntimeError(f"still writing after {most} passes")


def _runs(raw: Raw) -> SlotReport:
    metadata = raw["metadata"]
    return SlotReport(
        SlotKey(metadata["uid"], metadata["generation"]),
        SlotState.RUNNING,
        gate_open=True,
        endpoint="http://10.0.0.1:30800/slots/x",
        version=f"{raw['spec']['weights']['run']}@1.0",
        digest="d",
    )


def _settings() -> Settings:
    return Settings(
        namespace=SYSTEM,
        router_image="rose:bench",
        stores={"main": "store:7446"},
        token="bench",  # noqa: S106  # nobody listens
        identity="bench",
        tenancy=False,
    )


def flags() -> argparse.ArgumentParser:
    """The knobs."""
    parser = argparse.ArgumentParser(prog="python -m bench.operator.passes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the fleet")
    parser.add_argument("--passes", type=int, default=24, help="of each kind")
    parser.add_argument("--profile", type=Path, help="where the time of passes goes, for pstats")
    return parser


async def measured(
    inside: Inside, passes: int, happen: Callable[[int], None], seconds: float
) -> list[float]:
    """Processor time of each pass after something has happened."""
    spent = []
    for number in range(passes):
        inside.now += seconds
        happen(number)
        await inside.reconciler.run_pass()
        spent.append(inside.reconciler.worked_seconds)
    return sorted(spent)


async def run(fleet: Fleet, passes: int) -> list[Figure]:
    """All kinds of passes."""
    inside = Inside(fleet)
    inside.report()
    await inside.reconciler.run_pass()
    figures = [figure("first pass", inside.reconciler.worked_seconds, "s")]
    await inside.settle()

    def rest(_: int) -> None:
        inside.report()

    def change(number: int) -> None:
        nodes = list(inside.agents)[number % 5 :: 5]
        inside.agents[nodes[number % len(nodes)]].restart_a_pod()
        inside.report(nodes)
        lease = fleet.lease(f"grpo-{number % fleet.leases}", number % fleet.pools, 1 + number % 3)
        inside.put(ObjectKind.LEASE, lease)

    writes = inside.api.writes
    resting = await measured(inside, passes, rest, 5.0)
    figures += _of("at rest", resting)
    figures.append(figure("at rest, writes", inside.api.writes - writes, "", at_most=0))
    figures += _of("one change", await measured(inside, passes, change, 1.0))
    since = time.process_time()
    for _ in range(passes):
        inside.report()
    spent = (time.process_time() - since) / passes / fleet.nodes
    figures.append(figure("a report taken in (with its making)", spent * 1e6, "us"))
    return figures


def _of(name: str, spent: list[float]) -> list[Figure]:
    return [
        figure(f"{name}, median", spent[len(spent) // 2], "s"),
        figure(f"{name}, most", spent[-1], "s", at_most=1.0),
    ]


def main() -> int:
    """Measure and report."""
    given = flags().parse_args()
    fleet = (QUICK if given.quick else FULL).fleet
    profile = cProfile.Profile(time.process_time) if given.profile else None
    if profile is not None:
        profile.enable()
    figures = asyncio.run(run(fleet, given.passes))
    if profile is not None:
        profile.disable()
        profile.dump_stats(given.profile)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        return 0  # a profiler's figures are no figures
    record("operator-passes", figures, notes=[f"{fleet.nodes} nodes, {fleet.replicas} replicas"])
    return 0 if all(one.met is not False for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
