"""Pools that ask for more than time-slicing: node by node, with the engine host's word why."""

from __future__ import annotations

from typing import Any

import msgspec

from rose_core.wire.sync import Sharing, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.leader import LeaderLock
from tests.operator.bench import Bench
from tests.operator.stub_agent import replica
from tests.operator.test_decisions import ask as ask_why
from tests.operator.test_sync import ask

READY = {"DeviceAccess": "", "MPS/GPU-a": "", "DriverMemoryLimit": ""}


def report(bench: Bench, reported: dict[str, str]) -> None:
    bench.telemetry.record(
        SyncRequest("n1", "t", 0, (replica("default/chat", "a"),), (), reported), bench.now
    )


def conditions(bench: Bench) -> dict[str, dict[str, Any]]:
    status = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]
    return {entry["type"]: entry for entry in status["conditions"]}


async def wanting(reported: dict[str, str], **spec: object) -> Bench:
    bench = Bench()
    bench.pool(**{f"spec.{name}": value for name, value in spec.items()})
    bench.lease()
    report(bench, reported)
    await bench.turn(3)
    return bench


async def test_a_node_without_mps_lends_nothing_of_a_pool_that_asks_for_it() -> None:
    text = "MpsServingOutside: serving is no client; mount its directory"
    bench = await wanting({**READY, "MPS/GPU-a": text}, compute="MPS")
    assert bench.slots() == []
    found = conditions(bench)
    assert found["Accepted"]["status"] == "True"
    assert found["ComputeAvailable"]["reason"] == "MpsServingOutside"
    assert "n1" in found["ComputeAvailable"]["message"]
    assert "mount its directory" in found["ComputeAvailable"]["message"]
    assert found["DeviceAccess"]["status"] == "True"
    assert found["MemoryAvailable"]["status"] == "True"
    report(bench, READY)
    await bench.turn(2)
    assert conditions(bench)["ComputeAvailable"]["status"] == "True"
    assert len(bench.slots()) == 1


async def test_the_owners_share_travels_to_the_engine_and_follows_the_pool() -> None:
    bench = await wanting(READY, compute="MPS", maxComputePercent=20, memoryLimit="Driver")
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    await lock.step()
    reply = await ask(bench, lock)
    (grant,) = reply.grants
    assert grant.engine.sharing == Sharing("MPS", 20, "Reserved", "Driver")
    assert [policy.compute for policy in reply.pools] == ["MPS"]
    bench.pool(**{"spec.compute": "MPS", "spec.maxComputePercent": 50})
    report(bench, READY)
    await bench.turn(2)
    (again,) = (await ask(bench, lock)).grants
    assert again.engine.sharing == Sharing("MPS", 50)
    assert again.key.slot.generation > grant.key.slot.generation, "the engine has to start anew"
    bench.pool(
        **{"spec.compute": "MPS", "spec.maxComputePercent": 50, "spec.busyComputePercent": 20}
    )
    report(bench, READY)
    await bench.turn(3)
    (twice,) = (await ask(bench, lock)).grants
    assert twice.engine.sharing == Sharing("MPS", 50, busy_percent=20)


async def test_the_share_of_a_time_slicing_pool_starts_no_engine_anew() -> None:
    bench = await wanting({})
    (slot,) = bench.slots()
    bench.pool(**{"spec.maxComputePercent": 50})
    report(bench, {})
    await bench.turn(2)
    (same,) = bench.slots()
    assert same["metadata"]["generation"] == slot["metadata"]["generation"]


async def test_an_engine_host_that_cannot_reach_its_gpus_is_named() -> None:
    bench = await wanting({"DeviceAccess": "DeviceAccess: engines cannot open /dev/nvidia-uvm"})
    assert bench.slots() == []
    found = conditions(bench)["DeviceAccess"]
    assert (found["status"], found["reason"]) == ("False", "DeviceAccess")
    assert "/dev/nvidia-uvm" in found["message"]


async def test_what_guards_see_and_through_what_stands_in_the_condition() -> None:
    bench = Bench()
    bench.pool()
    listed = {
        "n1": "8 GPUs through NRI, driver 550.163.01",
        "n2": "8 GPUs through NRI, driver 550.163.01",
        "n3": "4 GPUs through NRI, driver 580.105.08",
    }
    for node, text in listed.items():
        one = replica("default/chat", node)
        bench.telemetry.record(SyncRequest(node, "t", 0, (one,), (), {"GpuAccess": text}), 0.0)
    await bench.turn(2)
    found = conditions(bench)["DeviceAccess"]
    assert (found["status"], found["message"]) == (
        "True",
        "8 GPUs through NRI, driver 550.163.01 (n1, n2); "
        "4 GPUs through NRI, driver 580.105.08 (n3)",
    )


async def proofs(*found: str, reported: str = "") -> dict[str, Any]:
    bench = Bench()
    bench.pool()
    replicas = tuple(
        msgspec.structs.replace(replica("default/chat", f"r{number}"), gpu_proof=proof)
        for number, proof in enumerate(found)
    )
    capabilities = {"GpuOwnership": reported} if reported else {}
    bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, (), capabilities), bench.now)
    await bench.turn(2)
    condition = conditions(bench)["OwnershipProven"]
    assert conditions(bench)["Ready"]["status"] == "True"
    return condition


async def test_a_pool_whose_gpus_the_kubelet_has_allocated_says_so() -> None:
    found = await proofs("Allocated", "Allocated")
    assert (found["status"], found["reason"]) == ("True", "AllAllocated")


async def test_gpus_that_are_told_by_process_lists_are_called_weakly_proven() -> None:
    text = "there is no kubelet.sock; GPUs are told by process lists, which proves less"
    found = await proofs("Allocated", "Processes", reported=text)
    assert (found["status"], found["reason"]) == ("False", "WeaklyProven")
    assert "1 of 2 replicas (n1)" in found["message"]
    assert text in found["message"]


async def test_an_agent_that_does_not_speak_of_ownership_leaves_it_unknown() -> None:
    assert (await proofs("Allocated", ""))["status"] == "Unknown"


async def test_who_uses_a_gpu_that_is_not_his_is_named_to_its_owner() -> None:
    text = "GPU GPU-a is used by pod evil/bait (process 33) as well"
    bench = Bench()
    bench.pool()
    bench.lease()
    ask_why(bench, ObjectKind.POOL, "chat", "why")
    one = msgspec.structs.replace(
        replica("default/chat", "a"), refusal="ForeignProcess", refusal_text=text
    )
    bench.telemetry.record(SyncRequest("n1", "t", 0, (one,), (), READY), bench.now)
    await bench.turn(3)
    assert bench.slots() == []
    status = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]
    assert text in str(status["explanation"])


async def test_what_an_older_engine_host_does_not_speak_of_is_not_there() -> None:
    bench = await wanting({"EngineHost": ""}, memorySource="Elastic")
    assert bench.slots() == []
    assert conditions(bench)["MemoryAvailable"]["reason"] == "ElasticUnavailable"


async def test_a_node_that_can_lends_elastic_memory_and_engine_and_agent_hear_of_it() -> None:
    lacking = {**READY, "ElasticMemory": "ElasticUnavailable: cannot use kvcached"}
    bench = await wanting(lacking, memorySource="Elastic")
    assert bench.slots() == []
    assert "cannot use kvcached" in conditions(bench)["MemoryAvailable"]["message"]
    report(bench, {**READY, "ElasticMemory": ""})
    await bench.turn(2)
    assert conditions(bench)["MemoryAvailable"]["status"] == "True"
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    await lock.step()
    reply = await ask(bench, lock)
    (grant,) = reply.grants
    assert grant.engine.sharing == Sharing(memory_source="Elastic")
    assert [policy.memory_source for policy in reply.pools] == ["Elastic"]
