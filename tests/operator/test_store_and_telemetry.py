"""The operator's memory: objects by version, reports by time."""

from typing import Any

from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.sync import SlotReport, SlotState, SyncRequest
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.plan.telemetry import NodeTelemetry
from tests.operator.stub_agent import replica


def thing(name: str, version: int, **spec: Any) -> dict[str, Any]:  # noqa: ANN401  # any field
    metadata = {"namespace": "n", "name": name, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec}


def names(store: ObjectCache) -> list[str]:
    return [raw["metadata"]["name"] for raw in store.all()]


def test_an_older_word_never_replaces_a_newer_one() -> None:
    news: list[int] = []
    store = ObjectCache(lambda: news.append(1))
    store.put(thing("a", 5, value=5))
    store.put(thing("a", 4, value=4))
    store.put(thing("a", 5, value=0))
    found = store.get("n/a")
    assert found is not None
    assert found["spec"] == {"value": 5}
    assert len(news) == 1


def test_only_new_objects_and_generations_ask_for_something() -> None:
    asked: list[int] = []
    store = ObjectCache(on_request=lambda: asked.append(1))
    for version, generation in ((5, 1), (6, 1), (7, 2), (8, 2)):
        raw = thing("a", version)
        raw["metadata"]["generation"] = generation
        store.put(raw)
    assert len(asked) == 2  # made, and changed by its owner; statuses ask for nothing


def test_a_deleted_object_is_not_raised_by_a_late_event() -> None:
    store = ObjectCache()
    store.put(thing("a", 5))
    store.remove(thing("a", 7))
    store.put(thing("a", 6))
    assert names(store) == []
    store.put(thing("a", 8))
    assert names(store) == ["a"]
    store.remove(thing("a", 7))
    assert names(store) == ["a"]


def test_a_listing_buries_what_it_lacks_but_not_what_is_newer() -> None:
    store = ObjectCache()
    store.put(thing("old", 3))
    store.put(thing("new", 12))
    store.replace([thing("listed", 4)], 10)
    assert names(store) == ["listed", "new"]
    assert store.complete
    store.put(thing("old", 9))
    assert names(store) == ["listed", "new"]


def test_what_we_deleted_ourselves_stays_deleted() -> None:
    store = ObjectCache()
    store.put(thing("a", 5))
    store.forget("n/a")
    store.put(thing("a", 5))
    assert names(store) == []
    assert len(store) == 0


def request(*replicas: Any, slots: tuple[SlotReport, ...] = ()) -> SyncRequest:  # noqa: ANN401  # reports
    return SyncRequest("n1", "test", 0, replicas=replicas, slots=slots)


def slot_report(state: SlotState, **changes: Any) -> SlotReport:  # noqa: ANN401  # any field
    return SlotReport(SlotKey(SlotUid("s"), 1), state, **changes)


def test_kv_use_is_a_recent_mean_and_unknown_stays_unknown() -> None:
    telemetry = NodeTelemetry(0.0)
    telemetry.record(request(replica("s/p", "a", kv=0)), 1.0)
    telemetry.record(request(replica("s/p", "a", kv=1000)), 2.0)
    assert telemetry.nodes["n1"].kv == {"uid-a": 100.0}
    telemetry.record(request(replica("s/p", "a", kv_used_permille=None)), 3.0)
    assert telemetry.nodes["n1"].kv == {}


def test_short_stops_of_an_engine_are_no_news() -> None:
    telemetry = NodeTelemetry(0.0)
    assert telemetry.record(request(slots=(slot_report(SlotState.RUNNING),)), 1.0)
    assert not telemetry.record(request(slots=(slot_report(SlotState.STOPPED),)), 2.0)
    assert not telemetry.record(
        request(slots=(slot_report(SlotState.RUNNING, harvested_tokens=9),)), 3.0
    )
    assert telemetry.record(request(slots=(slot_report(SlotState.FAILED),)), 4.0)


def test_how_long_an_engine_has_been_stopped() -> None:
    telemetry = NodeTelemetry(0.0)
    telemetry.record(request(slots=(slot_report(SlotState.STOPPED),)), 10.0)
    telemetry.record(request(slots=(slot_report(SlotState.STOPPED),)), 15.0)
    assert telemetry.stopped_seconds("s", 20.0) == 10.0
    telemetry.record(request(slots=(slot_report(SlotState.RUNNING),)), 21.0)
    assert telemetry.stopped_seconds("s", 22.0) == 0.0


def test_requests_of_the_last_minutes_survive_an_agents_restart() -> None:
    telemetry = NodeTelemetry(0.0)
    for second in range(0, 1000, 5):
        done = {"requests_total": second * 2, "slow_requests_total": second // 10}
        telemetry.record(request(replica("s/p", "a", **done)), float(second))
    requests, slow = telemetry.recent("uid-a")
    assert 570 <= requests <= 630
    assert 27 <= slow <= 33
    telemetry.record(request(replica("s/p", "a", requests_total=4)), 1000.0)
    assert telemetry.recent("uid-a") == (0, 0)


def test_a_silent_node_is_forgotten_with_all_it_said() -> None:
    telemetry = NodeTelemetry(0.0)
    telemetry.record(request(replica("s/p", "a")), 10.0)
    assert telemetry.silence("n1", 15.0) == 5.0
    assert telemetry.silence("never", 15.0) == 15.0
    telemetry.forget(400.0, 300.0)
    assert telemetry.nodes == {}
    assert telemetry.recent("uid-a") == (0, 0)


def test_a_slot_that_is_gone_is_not_reported() -> None:
    telemetry = NodeTelemetry(0.0)
    telemetry.record(request(slots=(slot_report(SlotState.GONE),)), 1.0)
    assert telemetry.slot("s", "n1") is None
