"""An operator's inside on an API server in memory, with a fleet that reports and a clock of ours.

For figures of processor time, which need no network, and for profiles of a pass. Validation it has
none; ``bench.operator`` runs on a real API server.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from bench.operator.agents import Agent
from bench.operator.fleet import SYSTEM, Fleet
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
    """The reconciler of a fleet; ``now`` is the clock of everything."""

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
            said = msgspec.structs.replace(
                self.agents[node].request(), slots=tuple(running.get(node, ()))
            )
            self.telemetry.record(said, self.now)

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
