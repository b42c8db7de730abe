"""A lease whose engine fits nowhere: its node sizes one slot, and the lease hears the figures."""

from __future__ import annotations

from rose_core.api import RolloutLease, RolloutSlot, ServingPool
from rose_core.identity import SlotKey, SlotUid
from rose_core.lending import EngineNeeds
from rose_core.wire.sync import SlotReport, SlotState, SyncRequest
from rose_operator.plan.slot_terms import engine_of, sharing_of
from rose_operator.plan.snapshot import EngineSizes
from rose_operator.plan.telemetry import NodeTelemetry
from tests.api.objects import LEASE, POOL, SLOT, changed
from tests.operator.bench import Bench

GIB = 1 << 30
NEEDED, ROOM = 764 * GIB, 43 * GIB


def report_sizes(bench: Bench) -> None:
    """The node reports what its host found."""
    word = "InsufficientMemory"
    bench.report(SlotState.FAILED, reason=word, needs_bytes=NEEDED, lendable_bytes=ROOM)


async def refused() -> Bench:
    """An operator whose only lease has had one slot, too large for its node."""
    bench = Bench()
    bench.pool()
    bench.lease()
    report_sizes(bench)
    await bench.turn(2)
    assert len(bench.slots()) == 1, "nobody knows the size before a node was to start the engine"
    report_sizes(bench)
    await bench.turn(2)
    return bench


async def test_the_slot_is_taken_back_and_the_lease_hears_what_it_lacks() -> None:
    bench = await refused()
    (slot,) = bench.slots()
    assert slot["spec"]["releaseReason"] == "InsufficientMemory"
    granted = bench.condition(kind="Granted")
    assert (granted["status"], granted["reason"]) == ("False", "InsufficientMemory")
    assert (
        "needs 764.0 GiB per GPU with tp=1, the most lendable is 43.0 GiB on n1"
        in (granted["message"])
    )


async def test_nothing_is_tried_again_until_more_may_be_lent_or_less_is_asked_for() -> None:
    bench = await refused()
    for _ in range(20):
        bench.now += 5.0
        report_sizes(bench)
        await bench.turn()
    assert bench.slots() == [], "its node has given it back, and nothing came in its place"
    bench.lease(spec__kvTokens=4096)
    await bench.turn()
    assert len(bench.slots()) == 1, "an engine that has not been sized yet"


def test_a_size_is_of_one_lease_one_pool_and_the_terms_of_both() -> None:
    pool = ServingPool.model_validate(POOL)
    lease = RolloutLease.model_validate(changed(LEASE, {"metadata.uid": "lease-1"}))
    made = {"metadata.uid": "u-1", "metadata.generation": 1, "spec.leaseRef.uid": "lease-1"}
    slot = RolloutSlot.model_validate(changed(SLOT, made))
    terms = {"engine": engine_of(lease), "sharing": sharing_of(pool)}
    slot = slot.model_copy(update={"spec": slot.spec.model_copy(update=terms)})
    sizes, telemetry, pools = EngineSizes(), NodeTelemetry(0.0), {slot.spec.pool_ref.key: pool}
    node = slot.spec.member.node
    known = EngineNeeds({(slot.spec.pool_ref.key, node): NEEDED})

    def reported(generation: int, needs: int | None) -> EngineNeeds:
        key = SlotKey(SlotUid("u-1"), generation)
        report = SlotReport(key, SlotState.STARTING, needs_bytes=needs)
        telemetry.record(SyncRequest(node, "t", 0, (), (report,)), 0.0)
        sizes.observe([lease], [slot], telemetry)
        return sizes.needs(lease, pools)

    assert reported(1, None) == EngineNeeds(), "unknown is not small"
    assert reported(2, NEEDED) == EngineNeeds(), "of another generation"
    assert reported(1, NEEDED) == known
    assert reported(1, None) == known
    assert sizes.needs(lease, {}) == EngineNeeds()
    elastic = ServingPool.model_validate(changed(POOL, {"spec.memorySource": "Elastic"}))
    assert sizes.needs(lease, dict.fromkeys(pools, elastic)) == EngineNeeds()
    smaller = RolloutLease.model_validate(
        changed(LEASE, {"metadata.uid": "lease-1", "spec.kvTokens": 4096})
    )
    assert sizes.needs(smaller, pools) == EngineNeeds()
    sizes.observe([], [], telemetry)
    assert sizes.needs(lease, pools) == EngineNeeds()
