"""A reconcile pass on an API server in memory: differences only, one bad object alone."""

import json
from typing import Any

import pytest

from rose_core.api import Reason
from rose_core.host_reasons import HOST_MEANING, HostReason
from rose_core.identity import SlotKey
from rose_core.wire.sync import MOST_MODELS, NodeModel, SlotReport, SlotState, SyncRequest
from rose_operator import metrics
from rose_operator.errors import ApiUnavailable, NotLeader
from rose_operator.kube.api import ObjectKind
from tests.operator.bench import Bench, running
from tests.operator.stub_agent import replica


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


async def test_every_condition_is_there_from_the_first_visit_on_whatever_is_known() -> None:
    early = Bench()
    early.pool()
    early.lease()
    await early.turn()
    pool = status_of(early, ObjectKind.POOL, "default/chat")
    assert pool["TelemetryFresh"] == pool["SignalVerified"] == pool["DeviceAccess"] == "Unknown"
    lease = status_of(early, ObjectKind.LEASE, "default/grpo")
    assert lease["Granted"] == "False"
    later = await running()
    assert list(status_of(later, ObjectKind.POOL, "default/chat")) == list(pool)
    assert list(status_of(later, ObjectKind.LEASE, "default/grpo")) == list(lease)


def status_of(bench: Bench, kind: ObjectKind, key: str) -> dict[str, str]:
    """Status of every condition."""
    conditions = bench.api.objects[kind, key]["status"]["conditions"]
    return {one["type"]: one["status"] for one in conditions}


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


async def test_statuses_wait_for_a_new_lease_but_not_for_ever() -> None:
    bench = Bench()
    bench.pool()
    bench.lease()
    bench.report()
    bench.reconciler.hurry = lambda: True
    await bench.turn()
    assert bench.reason() == Reason.ROUTER_NOT_READY  # none had been written for long
    bench.lease("second")
    await bench.turn()
    assert [raw.get("status") for raw in bench.api.all(ObjectKind.LEASE)][1] is None
    bench.now += 3
    await bench.turn()
    assert bench.reason("second", "Accepted") == Reason.ACCEPTED


async def test_an_object_whose_deletion_went_unheard_is_forgotten_at_its_next_status() -> None:
    bench = await running()
    del bench.api.objects[ObjectKind.LEASE, "default/grpo"]
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


async def test_an_object_that_takes_no_status_gets_one_event_and_stops_nobody() -> None:
    bench = Bench()
    bench.api.refuse.add("poison")
    bench.pool()
    bench.lease("poison", spec__slots={"min": "many"})
    bench.lease("good")
    bench.report()
    for _ in range(6):
        bench.now += 60
        bench.report()
        await bench.turn()
    assert bench.reason("good", "Granted") == Reason.ALL_SLOTS_GRANTED
    found = [event for event in bench.api.events if event["involvedObject"]["name"] == "poison"]
    assert [event["reason"] for event in found] == [Reason.INVALID_SPEC]
    assert "slots" in found[0]["message"]
    tries = [write for write in bench.api.writes if write == ("status", "poison")]
    assert len(tries) > 1, "one Event, however often the status is tried"


async def test_a_lease_whose_bounds_contradict_each_other_gets_no_slot() -> None:
    bench = Bench()
    bench.pool()
    bench.lease("poison", spec__slots={"min": 3, "max": 1})
    bench.report()
    await bench.turn(2)
    assert bench.reason("poison", "Accepted") == Reason.INVALID_SPEC
    assert bench.slots() == []


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
        status = bench.api.objects[ObjectKind.LEASE, "default/grpo"]["status"]
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


async def test_what_a_pool_kept_back_is_written_once_a_minute_too() -> None:
    bench = await running()
    bench.api.writes.clear()
    for second in range(180):
        bench.now += 1
        bench.report(unlent_reserved_milliseconds=1000 * second)
        await bench.turn()
    assert 1 <= [name for _, name in bench.api.writes].count("chat") <= 4
    status = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]
    assert 100_000 < status["totals"]["unlentReservedMilliseconds"] < 180_000
    found = {"pool": "default/chat"}
    shown = metrics.REGISTRY.get_sample_value("rose_pool_unlent_reserved_seconds", found)
    assert shown == pytest.approx(179, abs=6)


async def test_nothing_is_remembered_of_what_is_gone() -> None:
    bench = await running()
    reporter = bench.reconciler._reporter
    slot = bench.slots()[0]["metadata"]
    key = f"{ObjectKind.SLOT.value} {slot['namespace']}/{slot['name']}"
    assert key in reporter._totals_at
    for kind, name in list(bench.api.objects):
        del bench.api.objects[kind, name]
        bench.stores[kind].forget(name)
    await bench.turn(25)
    assert reporter._totals_at == {}


async def test_an_expired_lease_gives_everything_back() -> None:
    bench = Bench()
    bench.pool()
    bench.lease(spec__lifetimeSeconds=60)
    made = bench.api.objects[ObjectKind.LEASE, "default/grpo"]
    made["metadata"]["creationTimestamp"] = "2027-01-15T08:00:00Z"  # START
    bench.report()
    await bench.turn(3)
    assert len(bench.slots()) == 1
    assert len(bench.api.all(ObjectKind.DEPLOYMENT)) == 1
    bench.now += 61
    bench.report()
    await bench.turn()
    bench.report()
    await bench.turn()
    assert bench.reason() == Reason.LEASE_EXPIRED
    assert bench.slots() == []
    assert bench.api.all(ObjectKind.DEPLOYMENT) == []


def models_of(bench: Bench, *found: NodeModel) -> None:
    """The node of both replicas says which models it has."""
    replicas = (replica("default/chat", "a"), replica("default/chat", "b", kv=300))
    bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, models=found), bench.now)


async def test_a_slot_goes_to_no_node_that_lacks_the_leases_model() -> None:
    bench = Bench()
    bench.pool()
    bench.lease()
    models_of(bench, NodeModel("another", 7, "d"))
    await bench.turn(2)
    assert bench.slots() == []
    granted = bench.condition(kind="Granted")
    assert granted["reason"] == Reason.NO_REPLICA_QUALIFIES
    assert "2 NoModel" in granted["message"]
    assert bench.condition(kind="RouterReady")["reason"] == Reason.NO_SLOT_POSSIBLE
    assert bench.api.all(ObjectKind.DEPLOYMENT) == []
    name = bench.api.objects[ObjectKind.LEASE, "default/grpo"]["spec"]["model"]["name"]
    models_of(bench, NodeModel("another", 7, "d"), NodeModel(name, 9, "e"))
    await settled(bench)
    assert len(bench.slots()) == 1
    held = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]["models"]
    assert {(one["name"], one["sizeBytes"], tuple(one["nodes"])) for one in held} == {
        ("another", 7, ("n1",)),
        (name, 9, ("n1",)),
    }


async def test_a_node_that_cannot_tell_all_its_models_is_tried() -> None:
    bench = Bench()
    bench.pool()
    bench.lease()
    models_of(bench, *TOO_MANY[:MOST_MODELS])
    await bench.turn(2)
    assert len(bench.slots()) == 1
    held = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]["models"]
    assert {one["missingNodes"] for one in held} == {0}


async def test_what_a_node_says_of_its_models_cannot_break_a_status() -> None:
    bench = Bench()
    bench.pool()
    models_of(bench, NodeModel("../x", 1, "d"), NodeModel("a" * 500, 1, "d"), *TOO_MANY)
    await bench.turn(2)
    held = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]["models"]
    assert len(held) <= 64
    assert {(one["sizeBytes"], len(one["digest"])) for one in held} == {(2**53, 64)}


TOO_MANY = [NodeModel(f"m{number}", 2**60, "d" * 900) for number in range(100)]


async def settled(bench: Bench) -> None:
    """Two passes, so far apart that a reason alone is written."""
    await bench.turn()
    bench.now += 6
    await bench.turn()


async def test_a_leases_scale_selects_the_pods_of_its_router() -> None:
    """An autoscaler that sets ``slots.max`` reads their figures."""
    bench = await running()
    selector = bench.api.objects[ObjectKind.LEASE, "default/grpo"]["status"]["selector"]
    (router,) = bench.api.all(ObjectKind.DEPLOYMENT)
    wanted = dict(one.split("=") for one in selector.split(","))
    assert wanted
    assert wanted.items() <= router["spec"]["template"]["metadata"]["labels"].items()


async def test_a_lease_says_why_its_slots_do_not_start() -> None:
    bench = await running()
    await bench.ready_routers()
    text = "engine argument 'dtype': 'float8' is not allowed"
    bench.report(SlotState.FAILED, reason="BadEngine", message=text)
    await settled(bench)
    ready = bench.condition()
    assert (ready["status"], ready["reason"]) == ("False", "BadEngine")
    assert ready["message"] == f"0 of 1 granted slots run; 1 BadEngine: {text}"
    bench.report()
    await settled(bench)
    assert (bench.reason(), bench.condition()["message"]) == ("SlotsReady", "")


async def test_a_lease_hears_nothing_of_its_slots_neighbours() -> None:
    bench = await running()
    await bench.ready_routers()
    text = "GPU-a has 3.0 GiB free: pod secret/chat-0 (pid 7) holds 130 GiB"
    bench.report(SlotState.FAILED, reason="InsufficientMemory", message=text)
    await settled(bench)
    ready = bench.condition()
    assert ready["reason"] == "InsufficientMemory"
    assert ready["message"].endswith(
        f"1 InsufficientMemory: {HOST_MEANING[HostReason.INSUFFICIENT_MEMORY]}"
    )
    assert "secret" not in json.dumps(bench.api.objects[ObjectKind.LEASE, "default/grpo"])


async def test_a_log_of_any_length_and_content_fits_into_a_lease() -> None:
    bench = await running()
    await bench.ready_routers()
    log = f"engine ended with exit code 1; its log ends: {'x' * 5000}\n\x1b[31mlast\u202e words"
    bench.report(SlotState.STARTING, reason="EngineExited", message=log)
    await settled(bench)
    ready = bench.condition()
    assert ready["reason"] == "EngineExited"
    assert ready["message"].isprintable()
    assert "exit code 1" in ready["message"]
    assert ready["message"].endswith("last words")
    assert len(ready["message"]) < 600


async def test_a_word_of_another_version_is_told_without_its_text() -> None:
    bench = await running()
    await bench.ready_routers()
    bench.report(SlotState.FAILED, reason="InventedLater", message="whatever it may say")
    await settled(bench)
    assert (bench.reason(), bench.condition()["message"]) == (
        "EngineFailed",
        "0 of 1 granted slots run; 1 EngineFailed",
    )


async def test_a_suspended_lease_gives_its_slots_back_and_keeps_its_url() -> None:
    bench = await running()
    bench.lease(spec__suspend=True)
    for _ in range(3):
        bench.report()
        await bench.turn()
    assert bench.reason() == Reason.SUSPENDED
    assert bench.slots() == []
    assert len(bench.api.all(ObjectKind.DEPLOYMENT)) == 1
    bench.lease()
    bench.report()
    await bench.turn()
    assert len(bench.slots()) == 1


async def test_reclaims_come_along_with_a_transition_and_are_no_transition() -> None:
    bench = await running()
    (slot,) = bench.slots()
    key = SlotKey(slot["metadata"]["uid"], slot["metadata"]["generation"])

    async def status_of(state: SlotState, count: int) -> Any:  # noqa: ANN401  # any field
        report = SlotReport(key, state, version="grpo@1.0", digest="d", reclaims={"Stop": count})
        replicas = (replica("default/chat", "a"), replica("default/chat", "b", kv=300))
        bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, (report,)), bench.now)
        await bench.turn(2)
        return bench.slots()[0]["status"]

    assert (await status_of(SlotState.STOPPED, 3))["reclaims"] == 0
    status = await status_of(SlotState.FAILED, 4)
    assert (status["state"], status["reclaims"]) == ("Failed", 4)
    bench.now += 1
    assert (await status_of(SlotState.STOPPED, 5))["state"] == "Running"
    bench.now += 31
    assert (await status_of(SlotState.STOPPED, 9))["state"] == "Stopped"
    ready = bench.slots()[0]["status"]["conditions"][0]
    assert (ready["type"], ready["reason"]) == ("Ready", "GateHeld")


async def test_a_release_reason_of_another_version_harms_nobody() -> None:
    bench = await running()
    (slot,) = bench.slots()
    slot["spec"] |= {"desired": "Released", "releaseReason": "FromTheFuture"}
    bench.api.add(ObjectKind.SLOT, slot)
    await bench.turn()
    assert bench.reason(kind="Reclaiming") == Reason.OTHER


async def test_events_tell_transitions_once() -> None:
    bench = await running()
    found = [event["reason"] for event in bench.api.events]
    assert found.count("Accepted") == 2  # the pool and the lease
    assert "NotReclaiming" not in found
    assert "NotPaused" not in found
    bench.api.events.clear()
    bench.report()
    await bench.turn(3)
    assert bench.api.events == []


async def test_replicas_of_a_router_get_a_name_of_their_own_and_lose_it_again() -> None:
    def services(bench: Bench) -> list[str]:
        return sorted(raw["metadata"]["name"] for raw in bench.api.all(ObjectKind.SERVICE))

    bench = await running()
    (name,) = services(bench)
    for replicas, wanted in ((2, [name, f"{name}-all"]), (1, [name])):
        bench.lease(spec__router={"replicas": replicas})
        bench.report()
        await bench.turn(2)
        assert services(bench) == wanted
        (deployment,) = bench.api.all(ObjectKind.DEPLOYMENT)
        assert deployment["spec"]["replicas"] == replicas
        bench.api.writes.clear()
        await bench.turn(2)
        assert not [write for write in bench.api.writes if name in str(write)]
