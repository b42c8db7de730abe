"""Pools, leases and their surroundings through whole passes: refusals, answers, deferral."""

from typing import Any

from rose_core.api import EXPLAIN_ANNOTATION, Reason
from rose_core.identity import SlotKey
from rose_core.lending.autoscalers import conflicting
from rose_core.wire.sync import (
    CertificateReport,
    SignalSource,
    SlotReport,
    SlotState,
    SyncRequest,
    Trial,
)
from rose_operator import metrics
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.leader import LeaderLock
from tests.operator.bench import Bench, running
from tests.operator.stub_agent import replica
from tests.operator.test_knowledge import SCALER
from tests.operator.test_sync import ask as sync


def explanation(bench: Bench, kind: ObjectKind, name: str) -> dict[str, Any] | None:
    found = bench.api.objects[kind, f"default/{name}"]["status"].get("explanation")
    return found if found is None else dict(found)


def ask(bench: Bench, kind: ObjectKind, name: str, request: str | None) -> None:
    raw = bench.api.objects[kind, f"default/{name}"]
    annotations = {EXPLAIN_ANNOTATION: request} if request else {}
    bench.api.add(kind, raw | {"metadata": raw["metadata"] | {"annotations": annotations}})


async def test_a_question_is_answered_once_with_a_verdict_for_every_replica() -> None:
    bench = await running()
    ask(bench, ObjectKind.LEASE, "grpo", "first")
    await bench.turn()
    found = explanation(bench, ObjectKind.LEASE, "grpo")
    assert found is not None
    assert found["request"] == "first"
    assert found["summary"].startswith("AllSlotsGranted: 1 of 1 slots. Priority 0, weight 1")
    verdicts = {one["replica"]: one["reason"] for one in found["verdicts"]}
    assert verdicts == {"default/a": "Lent", "default/b": "Qualifies"}
    bench.api.writes.clear()
    await bench.turn(2)
    assert bench.api.writes == []
    ask(bench, ObjectKind.LEASE, "grpo", "second")
    await bench.turn()
    again = explanation(bench, ObjectKind.LEASE, "grpo")
    assert again is not None
    assert again["request"] == "second"
    ask(bench, ObjectKind.LEASE, "grpo", None)
    bench.now += 10
    bench.report()
    await bench.turn(2)
    bench.now += 10
    bench.report()
    await bench.turn()
    assert explanation(bench, ObjectKind.LEASE, "grpo") is None


async def test_a_replica_that_spans_nodes_is_refused_by_name() -> None:
    bench = Bench()
    bench.pool()
    bench.lease()
    bench.report()
    # Groups of several pods are told by their agent; here the agents of two nodes claim one pod.
    both = (replica("default/chat", "a"), replica("default/chat", "b", kv=300))
    bench.telemetry.record(SyncRequest("n2", "t", 0, both, ()), bench.now)
    ask(bench, ObjectKind.LEASE, "grpo", "why")
    await bench.turn(2)
    assert bench.slots() == []
    found = explanation(bench, ObjectKind.LEASE, "grpo")
    assert found is not None
    assert {one["reason"] for one in found["verdicts"]} == {Reason.MULTI_NODE_REPLICA}
    assert {one["message"] for one in found["verdicts"]} == {"nodes n1 and n2 both report it"}


async def test_a_pool_says_what_it_cannot_see_without_the_tap() -> None:
    bench = Bench()
    bench.pool()
    bench.report()
    await bench.turn(2)
    assert (await seen_by(bench, SignalSource.WIRE_TAP)).endswith("not verified: a")
    result = await seen_by(bench, SignalSource.LOADS)
    assert result.startswith("Unknown NoWireTap seen by the engine's own figures, without the wire")
    assert "latency is not measured" in result
    assert (await seen_by(bench, None)).endswith("not verified: a")


async def seen_by(bench: Bench, signal: SignalSource | None) -> str:
    """What SignalVerified says, with one unverified replica seen by this source."""
    one = replica("default/chat", "a", signal=signal, verified=None)
    for _ in range(2):
        bench.now += 6  # another reason is told soon, another message alone after minutes
        bench.telemetry.record(SyncRequest("n1", "t", 0, (one,), ()), bench.now)
        await bench.turn()
    status = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]
    (found,) = [one for one in status["conditions"] if one["type"] == "SignalVerified"]
    return f"{found['status']} {found['reason']} {found['message']}"


async def test_a_pool_is_explained_too() -> None:
    bench = await running()
    ask(bench, ObjectKind.POOL, "chat", "why")
    await bench.turn()
    found = explanation(bench, ObjectKind.POOL, "chat")
    assert found is not None
    assert found["summary"].startswith("mode Lend: 1 of 2 replicas lent")
    assert {one["replica"] for one in found["verdicts"]} == {"default/a", "default/b"}


async def test_a_refused_lease_is_explained_by_its_refusal() -> None:
    bench = Bench()
    bench.pool()
    bench.lease(spec__engineClass="other")
    ask_first = bench.api.objects[ObjectKind.LEASE, "default/grpo"]
    ask_first["metadata"]["annotations"] = {EXPLAIN_ANNOTATION: "why"}
    bench.report()
    await bench.turn()
    found = explanation(bench, ObjectKind.LEASE, "grpo")
    assert found is not None
    assert found["summary"].startswith("UnknownEngineClass: engineClass 'other' is none of")


async def test_an_autoscaler_on_gpu_figures_forbids_lending_until_its_owner_says_otherwise() -> (
    None
):
    bench = Bench()
    bench.pool()
    bench.lease()
    replicas = (replica("default/chat", "chat-7d9f8b6c5d-x2x4z"),)
    bench.telemetry.record(SyncRequest("n1", "t", 0, replicas), bench.now)
    bench.reconciler.cluster_facts.autoscalers = conflicting([SCALER])
    await bench.turn(2)
    assert bench.slots() == []
    pool = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]["conditions"]
    accepted = next(entry for entry in pool if entry["type"] == "Accepted")
    assert accepted["reason"] == Reason.AUTOSCALER_CONFLICT
    assert "DCGM_FI_DEV_GPU_UTIL" in accepted["message"]
    assert bench.reason("grpo", "Accepted") == Reason.POOL_NOT_ACCEPTED
    bench.pool(
        **{
            "spec.lending": {
                "autoscalerCheck": "Ignore",
                "minUnlentReplicas": 0,
                "maxReplicasPercent": 100,
            }
        }
    )
    await bench.turn(2)
    assert len(bench.slots()) == 1


async def test_a_cordon_takes_the_slots_of_the_node_back_and_an_event_says_so() -> None:
    bench = await running()
    bench.reconciler.cluster_facts.cordoned = frozenset({"n1"})
    bench.api.events.clear()
    await bench.turn()
    (slot,) = bench.slots()
    assert slot["spec"]["releaseReason"] == Reason.NODE_CORDONED
    (event,) = [one for one in bench.api.events if one["reason"] == Reason.NODE_CORDONED]
    assert slot["metadata"]["name"] in event["message"]
    assert event["involvedObject"]["kind"] == "RolloutLease"


async def test_the_pool_says_what_its_next_request_is_promised() -> None:
    bench = Bench()
    bench.pool()

    async def certified(*, holds: bool) -> dict[str, str]:
        shown = CertificateReport(holds, "p99 of TTFT 300 + stop 40 = 340", 50, 2, 4.2)
        trial = Trial(1000, 9, 500, 4)
        # Replicas of one node share what they were told.
        pair = (replica("default/chat", name, certificate=shown, trial=trial) for name in "ab")
        bench.telemetry.record(SyncRequest("n1", "t", 0, tuple(pair)), bench.now)
        await bench.turn(2)
        reported = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]["conditions"]
        found: dict[str, str] = next(one for one in reported if one["type"] == "LendingCertified")
        return found

    shut = await certified(holds=False)
    assert (shut["status"], shut["reason"]) == ("False", Reason.NOT_CERTIFIED)
    bench.now += 5
    fits = await certified(holds=True)
    assert (fits["status"], fits["reason"]) == ("True", Reason.CERTIFICATE_HOLDS)
    assert "2 of 50 requests took longer than promised, 4 may" in fits["message"]
    assert "requests slow in at most 9 of 1000 busy periods (95 %" in fits["message"]


async def test_a_missed_objective_opens_the_pools_breaker() -> None:
    bench = Bench()
    bench.pool()
    bench.lease(spec__slots={"min": 0, "max": 2})

    def served(requests: int, slow: int) -> None:
        counts = {"requests_total": requests, "slow_requests_total": slow}
        replicas = tuple(replica("default/chat", name, **counts) for name in "ab")
        bench.telemetry.record(SyncRequest("n1", "t", 0, replicas), bench.now)

    served(0, 0)
    bench.now += 30
    served(100, 50)
    await bench.turn(2)
    assert bench.slots() == []
    reason = bench.api.objects[ObjectKind.POOL, "default/chat"]["status"]["conditions"]
    protected = next(entry for entry in reason if entry["type"] == "ServingProtected")
    assert protected["reason"] == Reason.OBJECTIVE_MISSED
    assert "2 BreakerOpen" in next(
        entry["message"]
        for entry in bench.api.objects[ObjectKind.LEASE, "default/grpo"]["status"]["conditions"]
        if entry["type"] == "Granted"
    )


async def test_states_on_the_way_are_joined_and_arrival_is_written_at_once() -> None:
    bench = Bench()
    bench.pool()
    bench.lease()
    bench.report()
    await bench.turn(2)
    (slot,) = bench.slots()
    key = SlotKey(slot["metadata"]["uid"], slot["metadata"]["generation"])

    async def reported(state: SlotState) -> list[tuple[str, str]]:
        bench.api.writes.clear()
        bench.now += 1
        report = SlotReport(key, state, version="grpo@1.0" if state is SlotState.RUNNING else "")
        replicas = (replica("default/chat", "a"), replica("default/chat", "b", kv=300))
        bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, (report,)), bench.now)
        await bench.turn()
        return [entry for entry in bench.api.writes if entry[1] == slot["metadata"]["name"]]

    assert await reported(SlotState.STARTING) == []
    assert await reported(SlotState.SYNCING) == []
    assert await reported(SlotState.RUNNING) == [("status", slot["metadata"]["name"])]


async def test_serving_alone_is_exported_for_autoscalers() -> None:
    bench = Bench()
    bench.pool()
    replicas = (
        replica("default/chat", "a", running_requests=3, kv=200, busy_permille=100),
        replica("default/chat", "b", running_requests=None, kv=400, busy_permille=None),
    )
    bench.telemetry.record(SyncRequest("n1", "t", 0, replicas), bench.now)
    await bench.turn()

    def value(name: str) -> float | None:
        return metrics.REGISTRY.get_sample_value(name, {"pool": "default/chat"})

    assert value("rose_pool_serving_running_requests") == 3
    assert value("rose_pool_serving_busy_ratio") == 0.1
    assert value("rose_pool_serving_kv_used_ratio") == 0.3


async def test_series_of_a_node_that_is_gone_go() -> None:
    bench = await running()
    metrics.GRANTS.labels("n1").set(1)
    bench.now += 301
    await bench.turn()
    assert metrics.REGISTRY.get_sample_value("rose_operator_grants", {"node": "n1"}) is None


async def test_a_large_fleet_is_asked_to_call_less_often() -> None:
    bench = await running()
    for number in range(1250):
        bench.telemetry.record(SyncRequest(f"many-{number}", "t", 0), bench.now)
    lock = LeaderLock(
        bench.api, identity="me", duration=15, offline_seconds=600, clock=lambda: bench.now
    )
    assert (await sync(bench, lock)).sync_period_seconds == 1251 / 250


async def test_a_lease_of_frozen_weights_is_synced_with_the_checkpoint_and_needs_no_store() -> None:
    bench = Bench()
    bench.pool()
    bench.lease(spec__weights={"frozen": True})
    label = "frozen@base.0123456789ab"
    for _ in range(3):
        bench.report(versions=(label,))
        await bench.turn(2)
    found = bench.condition(kind="WeightsSynced")
    assert (found["status"], found["reason"], found["message"]) == ("True", Reason.FROZEN, label)
    slots = bench.slots()
    assert slots
    for slot in slots:
        assert slot["spec"]["weights"]["frozen"]
        listed = {one["type"]: one["reason"] for one in slot["status"]["conditions"]}
        assert listed["WeightsSynced"] == Reason.FROZEN


async def test_a_lease_says_that_its_engines_sample_with_their_own_checkpoint() -> None:
    bench = Bench()
    bench.pool()
    bench.lease(spec__slots={"min": 2, "max": 2})
    own, other = "grpo@base.0123456789ab", "grpo@base.ba9876543210"

    async def synced(*versions: str) -> tuple[str, str, str]:
        for _ in range(3):
            bench.report(versions=versions)
            await bench.turn(2)
            bench.now += 150  # another reason for the same status is not urgent
        found = bench.condition(kind="WeightsSynced")
        return found["status"], found["reason"], found["message"]

    status, reason, message = await synced(own)
    assert (status, reason) == ("True", Reason.OWN_CHECKPOINT)
    assert message.startswith(f"{own}: ")
    for slot in bench.slots():
        found = {one["type"]: one["reason"] for one in slot["status"]["conditions"]}
        assert found["WeightsSynced"] == Reason.OWN_CHECKPOINT

    status, reason, message = await synced(own, other)
    assert (status, reason) == ("False", Reason.CHECKPOINTS_DIFFER)
    assert own in message
    assert other in message

    # The first publish is on its way: no turn begins where it has not arrived.
    status, reason, message = await synced(own, "grpo@1.0")
    assert (status, reason) == ("False", Reason.MIXED_VERSIONS)
    assert "get no turns until" in message
    assert (await synced("grpo@1.0"))[1] == Reason.VERSION_ATTESTED
