"""LeaderWorkerSets in the operator: one replica, a slot for each pod, guards told of each other."""

from __future__ import annotations

from typing import Any

from rose_core.api import Reason
from rose_core.identity import PodUid
from rose_core.wire.sync import FollowerPod, GroupPlace, ReplicaGroup, ReplicaReport, SyncRequest
from rose_operator.kube.api import ObjectKind
from tests.operator.bench import Bench
from tests.operator.stub_agent import replica
from tests.operator.test_decisions import ask, explanation
from tests.operator.test_sync import lock_of, service_of

BLIND: dict[str, Any] = {"signal": None, "verified": None, "kv_used_permille": None}


def pod(name: str, index: int, **changes: Any) -> ReplicaReport:  # noqa: ANN401  # any field
    return replica("default/chat", name, place=GroupPlace("llama/0", index, 2), **changes)


def report(bench: Bench, leader: ReplicaReport | None, follower: ReplicaReport) -> None:
    """Two nodes, each with a pod; no slot is realised."""
    bench.telemetry.record(
        SyncRequest("n1", "t", 0, (leader,) if leader else (), guard="10.0.0.1:7448"), bench.now
    )
    bench.telemetry.record(SyncRequest("n2", "t", 0, (follower,), guard="10.0.0.2:7448"), bench.now)


def lending() -> Bench:
    bench = Bench()
    bench.pool()
    bench.lease(spec__slots={"min": 1, "max": 4})
    return bench


async def test_each_pod_of_a_group_lends_on_its_node_by_its_leaders_telemetry() -> None:
    bench = lending()
    report(bench, pod("a", 0), pod("b", 1, **BLIND))
    await bench.turn(3)
    members = [raw["spec"]["members"][0] for raw in bench.slots()]
    assert sorted((one["node"], one["podName"]) for one in members) == [("n1", "a"), ("n2", "b")]
    status = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]
    assert (status["replicas"], status["lentReplicas"], status["qualifiedReplicas"]) == (1, 1, 1)
    (verified,) = [one for one in status["conditions"] if one["type"] == "SignalVerified"]
    assert verified["status"] == "True"


async def test_what_is_so_of_the_leader_is_so_of_its_followers() -> None:
    for changes, reason in (
        ({"signal": None}, Reason.SIGNAL_MISSING),
        ({"ready": False}, Reason.REPLICA_NOT_READY),
        ({"stopped": True}, Reason.STOP_REQUESTED),
        ({"refusal": "BreakerOpen"}, Reason.BREAKER_OPEN),
        ({"kv_used_permille": 999}, Reason.KV_USE_TOO_HIGH),
    ):
        bench = lending()
        ask(bench, ObjectKind.LEASE, "grpo", "why")
        report(bench, pod("a", 0, **changes), pod("b", 1, **BLIND))
        await bench.turn(2)
        assert bench.slots() == []
        found = explanation(bench, ObjectKind.LEASE, "grpo")
        assert found is not None
        assert {one["reason"] for one in found["verdicts"]} == {reason}


async def test_a_group_lends_nothing_while_one_of_its_pods_is_not_ready() -> None:
    bench = lending()
    report(bench, pod("a", 0), pod("b", 1, **BLIND | {"ready": False}))
    await bench.turn(2)
    assert bench.slots() == []


async def test_a_group_lends_nothing_while_its_leaders_node_is_silent() -> None:
    bench = lending()
    ask(bench, ObjectKind.LEASE, "grpo", "why")
    report(bench, pod("a", 0), pod("b", 1, **BLIND))
    bench.now += 20.0  # more than a report may be old, and less than makes it forgotten
    follower = SyncRequest("n2", "t", 0, (pod("b", 1, **BLIND),), guard="10.0.0.2:7448")
    bench.telemetry.record(follower, bench.now)
    await bench.turn(2)
    assert bench.slots() == []
    found = explanation(bench, ObjectKind.LEASE, "grpo")
    assert found is not None
    assert {one["reason"] for one in found["verdicts"]} == {Reason.TELEMETRY_STALE}


async def test_a_guard_that_may_be_asked_from_now_on_makes_its_group_whole_at_once() -> None:
    bench = lending()
    for guard, whole in (("", False), ("10.0.0.2:7448", True)):
        leader = SyncRequest("n1", "t", 0, (pod("a", 0),), guard="10.0.0.1:7448")
        late = SyncRequest("n2", "t", 0, (pod("b", 1, **BLIND),), guard=guard)
        bench.telemetry.record(leader, bench.now)
        assert bench.telemetry.record(late, bench.now), "it matters at once"
        assert bool(bench.telemetry.groups_on("n1")) is whole


async def test_a_pod_whose_place_is_told_from_now_on_makes_its_group_whole_at_once() -> None:
    bench = lending()
    for place in (None, GroupPlace("llama/0", 1, 2)):
        report(bench, pod("a", 0), replica("default/chat", "b", place=place, **BLIND))
        assert bool(bench.telemetry.groups_on("n1")) is (place is not None)


async def test_a_group_without_its_leader_lends_nothing_and_says_what_is_missing() -> None:
    bench = lending()
    ask(bench, ObjectKind.LEASE, "grpo", "why")
    report(bench, None, pod("b", 1, **BLIND))
    await bench.turn(2)
    assert bench.slots() == []
    found = explanation(bench, ObjectKind.LEASE, "grpo")
    assert found is not None
    (verdict,) = found["verdicts"]
    assert verdict["reason"] == Reason.MULTI_NODE_REPLICA
    assert "worker-index 0 is not" in verdict["message"]


async def test_guards_hear_of_groups_that_have_a_pod_on_their_node() -> None:
    bench = lending()
    report(bench, pod("a", 0), pod("b", 1, **BLIND))
    bench.telemetry.record(SyncRequest("n3", "t", 0), bench.now)
    lock = lock_of(bench)
    await lock.step()
    service = service_of(bench, lock)
    reported = ReplicaGroup(
        PodUid("uid-a"), "n1", "10.0.0.1:7448", (FollowerPod(PodUid("uid-b"), "n2"),)
    )
    for node, leader, received in (("n1", pod("a", 0), reported), ("n3", None, None)):
        reports = (leader,) if leader else ()
        reply = await service.sync(SyncRequest(node, "t", 0, reports, guard="10.0.0.1:7448"))
        assert reply.groups == ((received,) if received else ())
    # Its pod is gone: nobody follows, nobody is answered.
    await service.sync(SyncRequest("n1", "t", 0, guard="10.0.0.1:7448"))
    again = await service.sync(
        SyncRequest("n2", "t", 0, (pod("b", 1, **BLIND),), guard="10.0.0.2:7448")
    )
    assert again.groups == ()
    bench.telemetry.forget(bench.now + 100, 10)
    assert bench.telemetry.groups == {}
