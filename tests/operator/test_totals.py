"""A lease's totals: granted and open time and tokens, through restarts of an agent."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rose_core.api import RolloutLease, RolloutSlot, ServingPool
from rose_core.api.poolstatus import MOST_NODES
from rose_core.api.rolloutlease import MOST_ROUTERS, Totals
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.routing import DemandNote
from rose_core.wire.sync import SlotReport, SlotState, SyncRequest
from rose_operator.metrics import REGISTRY
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.plan.telemetry import NodeTelemetry
from rose_operator.status.accounting import pool_totals, totals
from tests.api import objects
from tests.operator.bench import Bench
from tests.operator.stub_agent import replica


def _after(lease: RolloutLease, lent: int, opened: int, tokens: int, **more: Any) -> RolloutLease:  # noqa: ANN401  # counters
    """The lease once its only slot's agent has reported this."""
    slot = RolloutSlot.model_validate(objects.SLOT)
    telemetry = NodeTelemetry(0.0)
    report = SlotReport(
        SlotKey(SlotUid(slot.metadata.uid), 1),
        SlotState.RUNNING,
        lent_milliseconds=lent,
        open_milliseconds=opened,
        harvested_tokens=tokens,
        **more,
    )
    request = SyncRequest(slot.spec.member.node, "test", 1, slots=(report,))
    telemetry.record(request, 1.0)
    world = cast("ClusterState", SimpleNamespace(telemetry=telemetry, notes={}))
    status = lease.status.model_copy(update={"totals": totals(lease, [slot], world)})
    return lease.model_copy(update={"status": status})


def _counted(lease: RolloutLease, *notes: DemandNote) -> RolloutLease:
    """The lease once its routers have said this."""
    now = datetime(2026, 1, 2, tzinfo=UTC)
    world = SimpleNamespace(
        telemetry=NodeTelemetry(0.0), notes={lease.metadata.key: list(notes)}, now=now
    )
    found = totals(lease, [], cast("ClusterState", world))
    status = lease.status.model_copy(update={"totals": found})
    return lease.model_copy(update={"status": status})


def _answers(lease: RolloutLease) -> tuple[int, int]:
    found = lease.status.totals
    return found.accepted_trajectories, found.correct_answers


def _figures(found: Totals) -> tuple[int, int, int]:
    return found.lent_milliseconds, found.open_milliseconds, found.harvested_tokens


def test_counters_are_added_by_what_they_grew_also_when_they_begin_anew() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    lease = _after(lease, 1000, 400, 50)
    lease = _after(lease, 3000, 900, 80)
    assert _figures(lease.status.totals) == (3000, 900, 80)
    lease = _after(lease, 500, 100, 5)  # the agent was restarted
    assert _figures(lease.status.totals) == (3500, 1000, 85)
    (entry,) = lease.status.totals.slots
    assert (entry.lent_milliseconds, entry.open_milliseconds) == (500, 100)


def test_memory_kept_back_is_added_likewise() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    lease = _after(lease, 1000, 400, 50, reserved_milliseconds=300)
    lease = _after(lease, 3000, 900, 80, reserved_milliseconds=700)
    assert lease.status.totals.reserved_milliseconds == 700
    lease = _after(lease, 500, 100, 5, reserved_milliseconds=100)  # the agent was restarted
    assert lease.status.totals.reserved_milliseconds == 800


def test_weights_and_what_live_traffic_met_are_added_likewise() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    read = {
        "serving_input_tokens": 800,
        "serving_output_tokens": 90,
        "serving_requests_with_tokens": 8,
    }
    lease = _after(
        lease, 1000, 400, 50, weight_bytes=900, serving_requests=10, slo_violations=1, **read
    )
    lease = _after(
        lease, 1000, 400, 50, weight_bytes=1000, serving_requests=30, slo_violations=1, **read
    )
    lease = _after(lease, 5, 4, 5, weight_bytes=70, serving_requests=2, slo_violations=1)
    found = lease.status.totals
    assert (found.weight_bytes, found.serving_requests, found.slo_violations) == (1070, 32, 2)
    assert (found.serving_input_tokens, found.serving_output_tokens) == (800, 90), "and anew: none"
    assert found.serving_requests_with_tokens == 8
    (entry,) = found.slots
    assert (entry.weight_bytes, entry.serving_requests, entry.slo_violations) == (70, 2, 1)


def test_what_trainers_said_is_added_once_over_restarts_of_routers_and_operator() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    one = DemandNote(instance="one", accepted=10, correct=4)
    lease = _counted(lease, one)
    lease = _counted(lease, one)  # another operator, which knows the object alone
    assert _answers(lease) == (10, 4)
    lease = _counted(lease)  # nobody was heard yet
    assert _answers(lease) == (10, 4)
    lease = _counted(lease, DemandNote(instance="one", accepted=12, correct=4))
    lease = _counted(lease, DemandNote(instance="two", accepted=3, correct=3))  # it was replaced
    assert _answers(lease) == (15, 7)
    assert [entry.instance for entry in lease.status.totals.routers] == ["one", "two"]


def test_replicas_are_added_up_and_none_counts_back() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    notes = [DemandNote(instance=name, accepted=5, correct=1) for name in "ab"]
    lease = _counted(lease, *notes)
    lease = _counted(lease, DemandNote(instance="a", accepted=2, correct=9), notes[1])
    assert _answers(lease) == (10, 3), "no more answers are correct than were said now"
    lease = _counted(lease, DemandNote(accepted=99), DemandNote(instance="x" * 65, accepted=99))
    assert _answers(lease)[0] == 10


def test_tokens_that_routers_count_are_added_likewise() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    one = DemandNote(instance="one", dedicated_tokens=500, trained_tokens=300, reasoning_tokens=900)
    lease = _counted(lease, one)
    lease = _counted(lease, one, DemandNote(instance="two", dedicated_tokens=50))
    found = lease.status.totals
    assert (found.dedicated_tokens, found.trained_tokens) == (550, 300)
    assert found.reasoning_tokens == 300, "no more than was trained on"
    assert [entry.dedicated_tokens for entry in found.routers] == [500, 50]


def test_processes_that_are_gone_make_room_and_what_they_counted_stays() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    for number in range(MOST_ROUTERS + 5):
        lease = _counted(lease, DemandNote(instance=f"r{number}", accepted=1))
    assert _answers(lease) == (MOST_ROUTERS + 5, 0)
    assert len(lease.status.totals.routers) == MOST_ROUTERS
    assert lease.status.totals.routers[-1].instance == f"r{MOST_ROUTERS + 4}"


def test_the_router_of_an_older_lease_of_that_name_is_not_counted() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    made = lease.metadata.model_copy(update={"creation_timestamp": "2026-01-01T23:59:00+00:00"})
    lease = lease.model_copy(update={"metadata": made})
    lease = _counted(lease, DemandNote(instance="old", accepted=7, up_seconds=3600.0))
    assert _answers(lease) == (0, 0)
    lease = _counted(lease, DemandNote(instance="new", accepted=7, up_seconds=50.0))
    assert _answers(lease) == (7, 0)


def _kept(pool: ServingPool, **counts: int) -> ServingPool:
    """The pool once its nodes have said so much; two replicas of a node share the counter."""
    found = {
        node: replica("default/chat", node, unlent_reserved_milliseconds=count)
        for node, count in counts.items()
    }
    reports = [(node, one) for node, one in found.items() for _ in range(2)]
    world = cast("ClusterState", SimpleNamespace(reports_of=lambda _key: reports))
    status = pool.status.model_copy(update={"totals": pool_totals(pool, world)})
    return pool.model_copy(update={"status": status})


def _unlent(pool: ServingPool) -> int:
    return pool.status.totals.unlent_reserved_milliseconds


def test_memory_that_a_pool_kept_back_is_added_by_node_through_restarts() -> None:
    pool = _kept(ServingPool.model_validate(objects.POOL), a=1000, b=50)
    assert _unlent(pool) == 1050
    pool = _kept(pool, a=1500, b=50)
    pool = _kept(pool, b=80)  # a is not heard for a while
    pool = _kept(pool, a=1600, b=80)
    assert _unlent(pool) == 1680
    pool = _kept(pool, a=100, b=80)  # its guard was restarted
    assert _unlent(pool) == 1780
    assert {one.node for one in pool.status.totals.nodes} == {"a", "b"}


def test_nodes_that_are_gone_make_room_and_those_without_room_are_not_counted_twice() -> None:
    pool = _kept(ServingPool.model_validate(objects.POOL), gone=7)
    many = {f"n{number:04}": 10 for number in range(MOST_NODES + 5)}
    pool = _kept(pool, **many)
    assert len(pool.status.totals.nodes) == MOST_NODES
    assert "gone" not in {one.node for one in pool.status.totals.nodes}
    assert _unlent(_kept(pool, **many)) == _unlent(pool) == 7 + 10 * MOST_NODES
    more = {"a-new": 10} | dict.fromkeys(many, 30)
    assert _unlent(_kept(_kept(pool, **many), **more)) == 7 + 30 * MOST_NODES, "others go on"


def test_counts_that_no_status_can_hold_end_no_pass() -> None:
    pool = _kept(ServingPool.model_validate(objects.POOL), a=1000)
    assert _unlent(_kept(pool, a=-5, b=2**60, **{"n" * 300: 1})) <= 2**53
    assert _unlent(_kept(pool, a=-5)) == 1000
    lease = _after(RolloutLease.model_validate(objects.LEASE), 100, 50, 7)
    assert _after(lease, -5, -5, -5).status.totals.lent_milliseconds == 100
    assert _after(lease, 2**60, 2**60, 7).status.totals.lent_milliseconds == 2**53


@pytest.mark.parametrize("revenue", [True, False])
async def test_what_late_requests_earn_is_exported_where_their_pool_says_it(
    *, revenue: bool
) -> None:
    bench = Bench()
    earns = {"spec.revenue": {"perMillionOutputTokensMicros": 2_000_000}}
    bench.pool(**(earns if revenue else {}))
    name = f"earns-{revenue}".lower()  # series are the process's own, and this test's
    bench.lease(name)
    bench.report()
    await bench.turn(2)
    (raw, *_) = bench.slots()
    met = SlotReport(
        SlotKey(raw["metadata"]["uid"], raw["metadata"]["generation"]),
        SlotState.RUNNING,
        version="grpo@1.0",
        serving_requests=50_000,
        slo_violations=3,
        serving_output_tokens=500_000,
        serving_requests_with_tokens=1000,
    )
    replicas = (replica("default/chat", "a"), replica("default/chat", "b", kv=300))
    for _ in range(8):  # totals are shown once every few seconds
        bench.now += 1
        bench.telemetry.record(SyncRequest("n1", "t", 0, replicas, (met,)), bench.now)
        await bench.turn()
    found = REGISTRY.get_sample_value("rose_lease_late_revenue", {"lease": f"default/{name}"})
    # Half a million tokens at 2 are 1, by the 1,000 requests that had them; three are late.
    assert found == (pytest.approx(0.003) if revenue else None)
