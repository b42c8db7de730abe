"""An operator's inside on an API server in memory, with a clock that the test turns."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rose_core.identity import SlotKey
from rose_core.lending import Demand, PlannerPolicy
from rose_core.wire.routing import AdapterVersion
from rose_core.wire.sync import SlotReport, SlotState, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.plan.telemetry import NodeTelemetry
from rose_operator.reconcile import Reconciler
from rose_operator.settings import Settings
from tests.api.objects import LEASE, POOL, changed
from tests.operator.fake_api import FakeApi
from tests.operator.stub_agent import replica

SETTINGS = Settings(
    namespace="rose-system",
    router_image="rose:test",
    stores={"main": "store:7446"},
    token="t",
    identity="me",
    tenancy=False,  # what policies allow is tested where it is the matter
)
START = 1_800_000_000.0


class Bench:
    """An operator's inside on the fake API, with a clock that the test turns."""

    def __init__(self, api: FakeApi | None = None, settings: Settings = SETTINGS) -> None:
        self.api = api or FakeApi()
        self.settings = settings
        self.now = 0.0
        self.leads = True
        self.demand: dict[str, Demand] = {}
        self.boot()

    def boot(self) -> None:
        """A new process: nothing is remembered but what the API server has."""
        self.stores = {kind: ObjectCache() for kind in ObjectKind}
        self.telemetry = NodeTelemetry(self.now)
        self.reconciler = Reconciler(
            self.settings,
            self.api,
            self.stores,
            self.telemetry,
            may_write=lambda: self.leads,
            clock=lambda: self.now,
            wall=lambda: START + self.now,
            policy=replace(
                PlannerPolicy(), settle_seconds=0.0, cool_seconds=0.0, toggle_seconds=0.0
            ),
            demand=self.demand.get,
        )
        self.read()
        self.reconciler.remember_pools()

    def read(self) -> None:
        for kind in ObjectKind:
            raws = self.api.all(kind)
            newest = max((int(raw["metadata"]["resourceVersion"]) for raw in raws), default=0)
            self.stores[kind].replace(raws, newest)

    async def turn(self, passes: int = 1) -> None:
        for _ in range(passes):
            self.read()
            await self.reconciler.run_pass()

    def pool(self, **changes: Any) -> None:  # noqa: ANN401  # any field
        lends = {"spec.mode": "Lend", "spec.slo": {"ttftMilliseconds": 500}}
        lends["spec.lending"] = {"maxReplicasPercent": 100, "minUnlentReplicas": 0}
        self.api.add(ObjectKind.POOL, changed(POOL, lends | changes))

    def lease(self, name: str = "grpo", **changes: Any) -> None:  # noqa: ANN401  # any field
        values = {key.replace("__", "."): value for key, value in changes.items()}
        self.api.add(ObjectKind.LEASE, changed(LEASE, {"metadata.name": name} | values))

    def report(
        self,
        state: SlotState = SlotState.RUNNING,
        tokens: int = 100,
        reason: str = "",
        message: str = "",
        versions: Sequence[str] = ("grpo@1.0",),
        *,
        needs_bytes: int | None = None,
        lendable_bytes: int | None = None,
        unlent_reserved_milliseconds: int = 0,
        adapters: tuple[AdapterVersion, ...] = (),
    ) -> None:
        """The agent of node n1 realises every slot that is lent, with these versions in turn."""
        lent = [raw for raw in self.api.all(ObjectKind.SLOT) if raw["spec"]["desired"] == "Lent"]
        slots = [
            SlotReport(
                SlotKey(raw["metadata"]["uid"], raw["metadata"]["generation"]),
                state,
                reason=reason,
                message=message,
                version=version,
                digest="d",
                lent_milliseconds=10 * tokens,
                harvested_tokens=tokens,
                needs_bytes=needs_bytes,
                adapters=adapters,
            )
            for raw, version in zip(lent, itertools.cycle(versions), strict=False)
        ]
        room: dict[str, Any] = {
            "lendable_bytes": lendable_bytes,
            "unlent_reserved_milliseconds": unlent_reserved_milliseconds,
        }
        replicas = (
            replica("default/chat", "a", **room),
            replica("default/chat", "b", kv=300, **room),
        )
        self.telemetry.record(SyncRequest("n1", "t", 0, replicas, tuple(slots)), self.now)

    async def ready_routers(self) -> None:
        """Every router that was made has a ready pod."""
        for raw in self.api.all(ObjectKind.DEPLOYMENT):
            await self.api.apply_status(
                ObjectKind.DEPLOYMENT, raw | {"status": {"readyReplicas": 1}}
            )

    def slots(self) -> list[dict[str, Any]]:
        return self.api.all(ObjectKind.SLOT)

    def reason(self, name: str = "grpo", kind: str = "Ready") -> str:
        return str(self.condition(name, kind)["reason"])

    def condition(self, name: str = "grpo", kind: str = "Ready") -> dict[str, Any]:
        raw = self.api.objects[ObjectKind.LEASE, f"default/{name}"]
        found = {entry["type"]: entry for entry in raw["status"]["conditions"]}
        return dict(found[kind])


async def running() -> Bench:
    bench = Bench()
    bench.pool()
    bench.lease()
    bench.report()
    await bench.turn(2)
    bench.report()
    await bench.turn(3)
    return bench
