"""Replicas lent whole: the pool's word reaches planner, slot, grant and status."""

from __future__ import annotations

from typing import Any

from rose_core.identity import SlotKey
from rose_core.wire.sync import ReplicaReport, SleepTerms, SlotReport, SlotState, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.leader import LeaderLock
from tests.operator.bench import Bench
from tests.operator.stub_agent import replica
from tests.operator.test_sync import ask

LENDING = {"maxReplicasPercent": 100, "minUnlentReplicas": 0, "forecast": {"maxBusyPercent": 40}}
WHOLE = {"minReleasedMebibytes": 512, "drainSeconds": 20, "wakeSeconds": 90, "maxBusyPercent": 40}
TROUGH = {"busyPermille": [100] * 48}


def full(name: str, **changes: Any) -> ReplicaReport:  # noqa: ANN401  # any field
    found: dict[str, Any] = {"refusal": "InsufficientMemory", "busy_permille": 100}
    return replica("default/chat", name, **found | changes)


def report(bench: Bench, *replicas: ReplicaReport, slots: tuple[SlotReport, ...] = ()) -> None:
    bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, slots), bench.now)


def status(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]
    return found


async def lending(**whole: Any) -> Bench:  # noqa: ANN401  # any field
    bench = Bench()
    spec = {"spec.lending": LENDING, "spec.wholeReplica": WHOLE | whole}
    bench.pool(**spec)
    bench.api.objects[ObjectKind.POOL, "default/chat"]["status"] = {"load": TROUGH}
    bench.lease(spec__slots={"min": 0, "max": 4})
    report(bench, *(full(name) for name in "abcd"))
    await bench.turn(3)
    return bench


async def test_the_owners_word_reaches_the_slot_the_grant_and_the_node() -> None:
    bench = await lending()
    (slot,) = bench.slots()
    assert slot["spec"]["tier"] == "Whole"
    assert status(bench)["asleepReplicas"] == 1
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    await lock.step()
    reply = await ask(bench, lock)
    assert [one.whole for one in reply.grants] == [True]
    assert [one.sleep for one in reply.pools] == [SleepTerms(512 << 20, 20.0, 90.0)]


async def test_a_drained_replica_keeps_its_slot_and_one_that_refuses_loses_it() -> None:
    bench = await lending()
    (slot,) = bench.slots()
    lent = slot["spec"]["members"][0]["podName"]
    others = [full(name) for name in "abcd" if name != lent]
    report(bench, full(lent, ready=False), *others)
    bench.now += 1
    await bench.turn(2)
    assert bench.slots()[0]["spec"]["desired"] == "Lent"
    key = SlotKey(slot["metadata"]["uid"], slot["metadata"]["generation"])
    pending = SlotReport(key, SlotState.PENDING)
    report(bench, full(lent, refusal="SleepRefused"), *others, slots=(pending,))
    await bench.turn(2)
    (taken,) = (one for one in bench.slots() if one["spec"]["members"] == slot["spec"]["members"])
    assert taken["spec"]["releaseReason"] == "SleepRefused"


async def test_a_replica_that_does_not_wake_is_told_by_name() -> None:
    bench = await lending(maxReplicas=2)
    report(bench, full("a", refusal="WakeOverdue", ready=False), full("b"))
    await bench.turn(2)
    found = {entry["type"]: entry for entry in status(bench)["conditions"]}
    assert found["ServingProtected"]["status"] == "False"
    assert found["ServingProtected"]["reason"] == "WakeOverdue"
    assert found["ServingProtected"]["message"].endswith(": a")


async def test_without_the_owners_word_nothing_sleeps() -> None:
    bench = Bench()
    bench.pool(**{"spec.lending": LENDING})
    bench.api.objects[ObjectKind.POOL, "default/chat"]["status"] = {"load": TROUGH}
    bench.lease(spec__slots={"min": 0, "max": 4})
    report(bench, *(full(name) for name in "abcd"))
    await bench.turn(3)
    assert bench.slots() == []
    assert status(bench)["asleepReplicas"] == 0
