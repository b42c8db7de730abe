"""A reconcile pass on an API server in memory: differences only, one bad object alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose_core.api import Reason
from rose_core.identity import SlotKey
from rose_core.lending import Policy
from rose_core.wire.sync import SlotReport, SlotState, SyncReply, SyncRequest
from rose_operator import routers
from rose_operator.api import Kind
from rose_operator.errors import ApiUnavailable, ConfigurationError, NotLeader
from rose_operator.leader import LeaderLock
from rose_operator.reconcile import Reconciler
from rose_operator.settings import Settings, parse
from rose_operator.store import Store
from rose_operator.sync import SyncService
from rose_operator.telemetry import Telemetry
from tests.api.objects import LEASE, POOL, changed
from tests.operator.fake_api import FakeApi
from tests.operator.stub_agent import replica

SETTINGS = Settings(
    namespace="rose-system",
    router_image="rose:test",
    stores={"main": "store:7446"},
    token="t",
    identity="me",
)
START = 1_800_000_000.0


class Bench:
    """An operator's inside on the fake API, with a clock that the test turns."""

    def __init__(self, api: FakeApi | None = None) -> None:
        self.api = api or FakeApi()
        self.now = 0.0
        self.leads = True
        self.boot()

    def boot(self) -> None:
        """A new process: nothing is remembered but what the API server has."""
        self.stores = {kind: Store() for kind in Kind}
        self.telemetry = Telemetry(self.now)
        self.reconciler = Reconciler(
            SETTINGS,
            self.api,
            self.stores,
            self.telemetry,
            may_write=lambda: self.leads,
            clock=lambda: self.now,
            wall=lambda: START + self.now,
            policy=replace(Policy(), settle_seconds=0.0, cool_seconds=0.0),
        )
        self.read()
        self.reconciler.remember_pools()

    def read(self) -> None:
        for kind in (Kind.POOL, Kind.LEASE, Kind.SLOT, Kind.DEPLOYMENT, Kind.SERVICE):
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
        self.api.add(Kind.POOL, changed(POOL, lends | changes))

    def lease(self, name: str = "grpo", **changes: Any) -> None:  # noqa: ANN401  # any field
        values = {key.replace("__", "."): value for key, value in changes.items()}
        self.api.add(Kind.LEASE, changed(LEASE, {"metadata.name": name} | values))

    def report(self, state: SlotState = SlotState.RUNNING, tokens: int = 100) -> None:
        """The agent of node n1 realises every slot that is lent."""
        slots = [
            SlotReport(
                SlotKey(raw["metadata"]["uid"], raw["metadata"]["generation"]),
                state,
                version="grpo@1.0",
                digest="d",
                lent_milliseconds=10 * tokens,
                harvested_tokens=tokens,
            )
            for raw in self.api.all(Kind.SLOT)
            if raw["spec"]["desired"] == "Lent"
        ]
        replicas = (replica("default/chat", "a"), replica("default/chat", "b", kv=300))
        self.telemetry.record(SyncRequest("n1", "t", 0, replicas, tuple(slots)), self.now)

    def slots(self) -> list[dict[str, Any]]:
        return self.api.all(Kind.SLOT)

    def reason(self, name: str = "grpo", kind: str = "Ready") -> str:
        raw = self.api.objects[Kind.LEASE, f"default/{name}"]
        found = {entry["type"]: entry for entry in raw["status"]["conditions"]}
        return str(found[kind]["reason"])


async def running() -> Bench:
    bench = Bench()
    bench.pool()
    bench.lease()
    bench.report()
    await bench.turn(2)
    bench.report()
    await bench.turn(3)
    return bench


async def test_a_correct_world_is_written_once_and_a_restart_writes_nothing() -> None:
    bench = await running()
    assert len(bench.slots()) == 1
    assert bench.reason() == Reason.ROUTER_NOT_READY
    bench.api.writes.clear()
    bench.now += 5
    bench.report(tokens=150)
    await bench.turn(3)
    assert bench.api.writes == []
    bench.boot()
    bench.report(tokens=150)
    await bench.turn(3)
    assert bench.api.writes == []


async def test_after_a_restart_agents_are_awaited() -> None:
    bench = await running()
    bench.boot()
    assert not bench.reconciler.agents_are_back()
    one = (replica("default/chat", "a"),)
    bench.telemetry.record(SyncRequest("n1", "t", 0, one), bench.now)
    assert [bench.reconciler.agents_are_back()] == [False]  # the pool had two replicas
    bench.report()
    assert [bench.reconciler.agents_are_back()] == [True]


async def test_a_refused_write_stops_nobody_else() -> None:
    bench = Bench()
    bench.pool()
    bench.lease("bad")
    bench.lease("good")
    bench.api.refuse = {"bad", "router-default-bad"}
    bench.report()
    await bench.turn(3)
    assert bench.reason("good", "Accepted") == Reason.ACCEPTED
    assert len(bench.slots()) == 2


async def test_an_object_whose_deletion_went_unheard_is_forgotten_at_its_next_status() -> None:
    bench = await running()
    del bench.api.objects[Kind.LEASE, "default/grpo"]
    bench.now += 61
    bench.report(tokens=999)  # the lease's totals differ, so its status is written
    await bench.reconciler.run_pass()
    await bench.reconciler.run_pass()
    (slot,) = bench.slots()
    assert slot["spec"]["releaseReason"] == "LeaseDeleted"


async def test_an_object_that_cannot_be_read_gets_its_answer_alone() -> None:
    bench = Bench()
    bench.pool()
    bench.lease("poison", spec__slots={"min": "many"})
    bench.lease("good")
    bench.report()
    await bench.turn(2)
    assert bench.reason("poison") == Reason.INVALID_SPEC
    assert bench.reason("good", "Accepted") == Reason.ACCEPTED
    bench.api.writes.clear()
    await bench.turn()
    assert ("status", "poison") not in bench.api.writes


async def test_reports_that_fit_no_object_harm_nobody() -> None:
    bench = await running()
    (slot,) = bench.slots()
    key = SlotKey(slot["metadata"]["uid"], slot["metadata"]["generation"])
    same, odd = replica("default/chat", "a"), replica("default/chat", "Not A Name", kv=0)
    bench.lease("second")
    for report in (
        SlotReport(key, SlotState.RUNNING, version="v" * 500),
        SlotReport(key, SlotState.RUNNING, version="grpo@1.0", endpoint="e" * 999),
    ):
        bench.telemetry.record(SyncRequest("n1", "t", 0, (same, odd), (report,)), bench.now)
        await bench.turn(2)
    assert len(bench.slots()) == 1
    assert bench.slots()[0]["status"]["endpoint"] == ""
    assert bench.reason("second", "Accepted") == Reason.ACCEPTED


async def test_a_dead_api_server_ends_the_pass_and_a_lost_lock_prevents_writes() -> None:
    bench = Bench()
    bench.pool()
    bench.lease()
    bench.report()
    bench.api.down = True
    bench.read()
    with pytest.raises(ApiUnavailable):
        await bench.reconciler.run_pass()
    bench.api.down = False
    bench.leads = False
    with pytest.raises(NotLeader):
        await bench.turn()
    assert bench.api.writes == []


async def test_a_released_slot_goes_when_its_node_reports_without_it() -> None:
    bench = await running()
    bench.pool(**{"spec.mode": "Paused"})
    await bench.turn()
    (slot,) = bench.slots()
    assert (slot["spec"]["desired"], slot["spec"]["releaseReason"]) == (
        "Released",
        "PoolNotLending",
    )
    held = SlotReport(SlotKey(slot["metadata"]["uid"], 1), SlotState.RELEASING)
    replicas = (replica("default/chat", "a"),)
    bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, (held,)), bench.now)
    await bench.turn(2)
    assert len(bench.slots()) == 1
    assert bench.reason(kind="Reclaiming") == Reason.POOL_NOT_LENDING
    bench.report()
    await bench.turn(2)
    assert bench.slots() == []


async def test_a_released_slot_of_a_silent_node_goes_when_its_grant_has_surely_lapsed() -> None:
    bench = await running()
    bench.pool(**{"spec.mode": "Paused"})
    await bench.turn()
    bench.now += 290
    await bench.turn(2)
    assert len(bench.slots()) == 1
    bench.now += 20
    await bench.turn(2)
    assert bench.slots() == []


async def test_a_changed_lease_gives_its_slot_a_new_generation() -> None:
    bench = await running()
    (before,) = bench.slots()
    bench.lease(spec__engineArguments={"dtype": "bfloat16"})
    await bench.turn()
    (after,) = bench.slots()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    assert after["spec"]["engine"]["arguments"] == {"dtype": "bfloat16"}


async def test_totals_are_neither_lost_nor_doubled_by_restarts_of_anybody() -> None:
    bench = await running()

    def tokens() -> int:
        status = bench.api.objects[Kind.LEASE, "default/grpo"]["status"]
        return int(status["totals"]["harvestedTokens"])

    async def later(count: int) -> None:
        bench.now += 61
        bench.report(tokens=count)
        await bench.turn(2)

    assert tokens() == 100
    await later(400)
    assert tokens() == 400
    bench.boot()
    bench.report(tokens=400)
    await bench.turn()
    await later(450)
    assert tokens() == 450
    await later(30)  # the agent's counter started anew
    assert tokens() == 480
    bench.lease(spec__slots={"min": 0, "max": 0})
    await bench.turn()
    bench.report()
    await bench.turn(2)
    assert bench.slots() == []
    assert tokens() == 480


async def test_totals_alone_are_written_once_a_minute() -> None:
    bench = await running()
    bench.api.writes.clear()
    for second in range(180):
        bench.now += 1
        bench.report(tokens=200 + second)
        await bench.turn()
    assert 1 <= len(bench.api.writes) <= 4
    assert {name for _, name in bench.api.writes} == {"grpo"}


async def test_an_expired_lease_gives_everything_back() -> None:
    bench = Bench()
    bench.pool()
    bench.lease(spec__lifetimeSeconds=60)
    made = bench.api.objects[Kind.LEASE, "default/grpo"]
    made["metadata"]["creationTimestamp"] = "2027-01-15T08:00:00Z"  # START
    bench.report()
    await bench.turn(3)
    assert len(bench.slots()) == 1
    assert len(bench.api.all(Kind.DEPLOYMENT)) == 1
    bench.now += 61
    bench.report()
    await bench.turn()
    bench.report()
    await bench.turn()
    assert bench.reason() == Reason.LEASE_EXPIRED
    assert bench.slots() == []
    assert bench.api.all(Kind.DEPLOYMENT) == []


async def test_reclaims_come_along_with_a_transition_and_are_no_transition() -> None:
    bench = await running()
    (slot,) = bench.slots()
    key = SlotKey(slot["metadata"]["uid"], slot["metadata"]["generation"])

    async def said(state: SlotState, count: int) -> Any:  # noqa: ANN401  # any field
        report = SlotReport(key, state, version="grpo@1.0", digest="d", reclaims={"Stop": count})
        replicas = (replica("default/chat", "a"), replica("default/chat", "b", kv=300))
        bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, (report,)), bench.now)
        await bench.turn(2)
        return bench.slots()[0]["status"]

    assert (await said(SlotState.STOPPED, 3))["reclaims"] == 0
    status = await said(SlotState.FAILED, 4)
    assert (status["state"], status["reclaims"]) == ("Failed", 4)
    bench.now += 1
    assert (await said(SlotState.STOPPED, 5))["state"] == "Running"
    bench.now += 31
    assert (await said(SlotState.STOPPED, 9))["state"] == "Stopped"
    ready = bench.slots()[0]["status"]["conditions"][0]
    assert (ready["type"], ready["reason"]) == ("Ready", "GateHeld")


async def test_a_release_reason_of_another_version_harms_nobody() -> None:
    bench = await running()
    (slot,) = bench.slots()
    slot["spec"] |= {"desired": "Released", "releaseReason": "FromTheFuture"}
    bench.api.add(Kind.SLOT, slot)
    await bench.turn()
    assert bench.reason(kind="Reclaiming") == Reason.OTHER


async def test_events_tell_transitions_once() -> None:
    bench = await running()
    told = [event["reason"] for event in bench.api.events]
    assert told.count("Accepted") == 2  # the pool and the lease
    assert "NotReclaiming" not in told
    assert "NotPaused" not in told
    bench.api.events.clear()
    bench.report()
    await bench.turn(3)
    assert bench.api.events == []


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("leads", [True, False])
async def test_sync_answers_completely_only_as_a_leader_that_knows_everything(
    known: bool, leads: bool
) -> None:
    bench = await running()
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    if leads:
        await lock.step()
    if not known:
        bench.stores[Kind.SLOT].complete = False
    reply = await ask(bench, lock)
    assert reply.complete is (known and leads)
    assert len(reply.grants) == (known and leads)


async def ask(bench: Bench, lock: LeaderLock, highest_term: int = 0) -> SyncReply:
    service = SyncService(
        SETTINGS, bench.stores, bench.telemetry, lock, clock=lambda: bench.now, wake=lambda: None
    )
    return await service.sync(SyncRequest("n1", "t", highest_term))


async def test_sync_offline_renews_and_a_higher_term_silences() -> None:
    bench = await running()
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    await lock.step()
    bench.now += 100
    reply = await ask(bench, lock)
    assert reply.complete
    (grant,) = reply.grants
    assert (grant.key.term, grant.ttl_seconds) == (1, SETTINGS.grant_seconds)
    assert [policy.pool for policy in reply.pools] == ["default/chat"]
    assert not (await ask(bench, lock, highest_term=9)).complete
    bench.now += 600
    assert not (await ask(bench, lock)).complete


def test_router_names_are_unique_and_short_enough() -> None:
    pairs = [("a-b", "c"), ("a", "b-c"), ("a", "b.c"), ("a", "b"), ("n" * 63, "l" * 253)]
    names = [routers.router_name(*pair) for pair in pairs]
    assert len(set(names)) == len(pairs)
    assert all(len(name) <= 63 for name in names)
    assert routers.router_name("research", "grpo-main") == "router-research-grpo-main"


def test_a_router_template_extends_the_pod() -> None:
    base = {"volumes": [{"name": "token"}], "a": {"b": 1, "c": 2}}
    extra = {"volumes": [{"name": "engine"}], "a": {"b": 3}, "d": 4}
    assert routers.merge(base, extra) == {
        "volumes": [{"name": "token"}, {"name": "engine"}],
        "a": {"b": 3, "c": 2},
        "d": 4,
    }


def flags(folder: Path, stores: str, token: str) -> list[str]:
    (folder / "stores.yaml").write_text(stores)
    (folder / "token").write_text(token)
    return [
        "--router-image=x",
        f"--stores-file={folder / 'stores.yaml'}",
        f"--token-file={folder / 'token'}",
    ]


def test_settings_from_files(tmp_path: Path) -> None:
    found = parse(flags(tmp_path, "main: store.example:7446\n", "secret\n"))
    assert found.stores == {"main": "store.example:7446"}
    assert found.token == "secret"


@pytest.mark.parametrize(
    ("stores", "token", "text"),
    [
        ("main: nowhere\n", "t", "expected host:port"),
        ("- main\n", "t", "expected a YAML mapping"),
        ("{", "t", "stores.yaml"),
        ("main: a:1\n", " \n", "is empty"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, stores: str, token: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        parse(flags(tmp_path, stores, token))


async def test_sync_forgets_what_it_derived_when_an_object_changes() -> None:
    bench = await running()
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    await lock.step()
    service = SyncService(
        SETTINGS, bench.stores, bench.telemetry, lock, clock=lambda: bench.now, wake=lambda: None
    )
    request = SyncRequest("n1", "t", 0)
    assert len((await service.sync(request)).grants) == 1
    assert (await service.sync(SyncRequest("n2", "t", 0))).grants == ()
    bench.pool(**{"spec.mode": "Paused"})
    bench.report()
    await bench.turn()
    reply = await service.sync(request)
    assert reply.grants == ()
    assert reply.pools[0].mode == "Paused"
