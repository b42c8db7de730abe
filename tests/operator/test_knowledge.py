"""What the operator gathers besides objects: parsed versions, loads, starts, nodes, autoscalers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from rose_core.api import RolloutLease, RolloutSlot, ServingPool
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.sync import NoticeRequest, SlotReport, SlotState, SyncRequest
from rose_operator.errors import ApiRefused
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.notices import Notices
from rose_operator.plan import cluster_facts
from rose_operator.plan.cluster_facts import ClusterFacts, zones
from rose_operator.plan.load_history import LoadHistory
from rose_operator.plan.telemetry import NodeTelemetry
from rose_operator.plan.toggle_costs import ToggleCosts
from rose_operator.plan.typed_objects import TypedReader
from tests.api.objects import LEASE, POOL, SLOT, changed
from tests.operator.stub_agent import replica

HALF_HOUR = 1800.0


def versioned(base: dict[str, Any], version: int, **changes: object) -> dict[str, Any]:
    return changed(base, {"metadata.resourceVersion": str(version)} | changes)


def test_an_object_is_parsed_once_per_version() -> None:
    store = ObjectCache()
    store.put(versioned(LEASE, 1))
    store.put(versioned(LEASE, 2, **{"metadata.name": "other"}))
    reader = TypedReader(RolloutLease, store)
    before = reader.read()
    assert reader.read() is before
    store.put(versioned(LEASE, 3))
    after = reader.read()
    assert after.good["default/other"] is before.good["default/other"]
    assert after.good["default/grpo"] is not before.good["default/grpo"]
    store.put(versioned(LEASE, 4, **{"spec.priority": "much"}))
    assert [bad.raw["metadata"]["name"] for bad in reader.read().bad] == ["grpo"]
    store.put(versioned(LEASE, 5, **{"metadata.deletionTimestamp": "2027-01-15T08:00:00Z"}))
    assert set(reader.read().good) == {"default/other"}


def test_loads_are_learned_for_pools_with_a_forecast_and_written_once_an_hour() -> None:
    asks = {"spec.lending": {"forecast": {"leadMinutes": 30}}}
    pool = ServingPool.model_validate(changed(POOL, asks))
    reports = {"default/chat": [replica("default/chat", "a", busy_permille=400)]}
    loads = LoadHistory()
    for step in range(3):
        loads.observe({"default/chat": pool}, reports, HALF_HOUR * step)
        assert loads.shape(pool, HALF_HOUR * step) == (None if step < 2 else loads_written(400, 2))
    found = loads.outlook("default/chat", pool.spec.lending.forecast, HALF_HOUR * 2)
    assert found is not None
    assert found.peak_permille == 400
    assert loads.outlook("default/chat", None, 0.0) is None
    loads.observe({}, {}, 0.0)
    assert loads.shape(pool, HALF_HOUR * 9) is None


def loads_written(permille: int, count: int) -> Any:  # noqa: ANN401  # compared only
    bins = [permille] * count + [-1] * (48 - count)
    status = {"status": {"load": {"busyPermille": bins}}}
    return ServingPool.model_validate(POOL | status).status.load


def test_a_restarted_operator_goes_on_with_the_shape_in_the_status() -> None:
    asks = {"spec.lending": {"forecast": {}}, "status.load": {"busyPermille": [700] * 48}}
    pool = ServingPool.model_validate(changed(POOL, asks))
    loads = LoadHistory()
    reports = {"default/chat": [replica("default/chat", "a", busy_permille=700)]}
    loads.observe({"default/chat": pool}, reports, 5 * HALF_HOUR)
    found = loads.outlook("default/chat", pool.spec.lending.forecast, 5 * HALF_HOUR)
    assert found is not None
    assert found.peak_permille == 700


def test_what_a_loan_costs_is_learned_from_starts_that_were_seen_whole() -> None:
    made = {"metadata.uid": "u-1", "metadata.creationTimestamp": "1970-01-01T00:01:40Z"}
    slot = RolloutSlot.model_validate(changed(SLOT, made | {"metadata.generation": 1}))
    toggles, telemetry = ToggleCosts(), NodeTelemetry(0.0)

    def reported(state: SlotState) -> None:
        report = SlotReport(SlotKey(SlotUid("u-1"), 1), state)
        telemetry.record(SyncRequest("n0", "t", 0, (), (report,)), 0.0)

    reported(SlotState.RUNNING)
    toggles.observe([slot], telemetry, 150.0)
    assert toggles.has_run("u-1")
    assert toggles.seconds("u-1") is None  # it ran before we looked
    toggles = ToggleCosts()
    reported(SlotState.STARTING)
    toggles.observe([slot], telemetry, 110.0)
    assert not toggles.has_run("u-1")
    reported(SlotState.RUNNING)
    toggles.observe([slot], telemetry, 145.0)
    assert toggles.seconds(slot.spec.lease_ref.uid) == 45.0
    toggles.observe([], telemetry, 146.0)
    assert toggles.seconds(slot.spec.lease_ref.uid) is None


async def test_notices_reach_their_node_and_join_when_they_come_quickly() -> None:
    notices = Notices()
    followed = notices.follow(NoticeRequest("n1"))
    first = asyncio.ensure_future(anext(followed))
    await asyncio.sleep(0)
    notices.notify(["n2"])
    notices.notify(["n1"])
    notices.notify(["n1"])
    async with asyncio.timeout(5):
        await first
    assert len(notices) == 1
    second = asyncio.ensure_future(anext(followed))
    await asyncio.sleep(0)
    assert not second.done()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await followed.aclose()
    assert len(notices) == 0


class AroundApi:
    """Nodes and autoscalers, some of which may not be read."""

    def __init__(self, **items: list[dict[str, Any]]) -> None:
        self.items = {ObjectKind[name.upper()]: found for name, found in items.items()}

    async def list(self, kind: ObjectKind) -> tuple[list[dict[str, Any]], int]:
        if kind not in self.items:
            raise ApiRefused(403, "forbidden")
        return self.items[kind], 1


NODE = {"metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "z1"}}}
SCALER = {
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": "chat", "namespace": "default"},
    "spec": {
        "scaleTargetRef": {"name": "chat"},
        "metrics": [{"type": "Pods", "pods": {"metric": {"name": "DCGM_FI_DEV_GPU_UTIL"}}}],
    },
}


async def test_what_cannot_be_read_is_not_taken_into_account_and_stops_nothing() -> None:
    received: list[int] = []
    around = ClusterFacts(lambda: received.append(1))
    await around.refresh(AroundApi(autoscaler=[SCALER]))  # type: ignore[arg-type]  # nothing else is asked
    assert around.zones == {}
    assert [one.target for one in around.autoscalers] == ["chat"]
    assert received == [1]
    await around.refresh(AroundApi(autoscaler=[SCALER], node=[NODE]))  # type: ignore[arg-type]
    assert around.zones == {"n1": "z1"}
    assert received == [1]


class CordonApi:
    """One cordoned node; the first watch is refused with a code, the later ones stay open."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.watches = 0
        self.watched = asyncio.Event()

    async def list(self, _kind: ObjectKind) -> tuple[list[dict[str, Any]], int]:
        return ([NODE] if self.watches else []), 1

    async def watch(
        self, _kind: ObjectKind, _version: int
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        self.watches += 1
        self.watched.set()
        if self.watches == 1:
            raise ApiRefused(self.code, "refused")
        await asyncio.Event().wait()
        yield "MODIFIED", NODE


@pytest.mark.parametrize(("code", "seen"), [(410, frozenset({"n1"})), (403, frozenset())])
async def test_a_watch_of_cordons_that_is_told_410_begins_anew_and_one_without_rights_rests(
    monkeypatch: pytest.MonkeyPatch, code: int, seen: frozenset[str]
) -> None:
    monkeypatch.setattr(cluster_facts, "_AGAIN_SECONDS", 0.0)
    around, api = ClusterFacts(), CordonApi(code)
    following = asyncio.create_task(around.watch_cordons(api))  # type: ignore[arg-type]
    await api.watched.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert around.cordoned == seen
    assert api.watches == len(seen) + 1


def test_nodes_without_a_zone_have_none() -> None:
    assert zones([NODE, {"metadata": {"name": "n2"}}]) == {"n1": "z1"}


def test_a_node_report_is_only_news_when_something_that_matters_changes() -> None:
    telemetry = NodeTelemetry(0.0)
    one = replica("default/chat", "a", kv=100)
    assert telemetry.record(SyncRequest("n1", "t", 0, (one,)), 1.0)
    busier = replica("default/chat", "a", kv=900)
    assert not telemetry.record(SyncRequest("n1", "t", 0, (busier,)), 2.0)
    unready = replica("default/chat", "a", ready=False)
    assert telemetry.record(SyncRequest("n1", "t", 0, (unready,)), 3.0)
    for more, is_news in ((40 << 30, True), ((40 << 30) + 4096, False), (41 << 30, True)):
        roomier = replica("default/chat", "a", ready=False, lendable_bytes=more)
        assert telemetry.record(SyncRequest("n1", "t", 0, (roomier,)), 4.0) == is_news
    assert replace(telemetry.nodes["n1"]).slots == {}
