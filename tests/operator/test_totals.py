"""A lease's totals: granted and open time and tokens, through restarts of an agent."""

from types import SimpleNamespace
from typing import Any, cast

from rose_core.api import RolloutLease, RolloutSlot
from rose_core.api.rolloutlease import Totals
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.sync import SlotReport, SlotState, SyncRequest
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.plan.telemetry import Telemetry
from rose_operator.status.accounting import totals
from tests.api import objects


def _after(lease: RolloutLease, lent: int, opened: int, tokens: int, **more: Any) -> RolloutLease:  # noqa: ANN401  # counters
    """The lease once its only slot's agent has reported this."""
    slot = RolloutSlot.model_validate(objects.SLOT)
    telemetry = Telemetry(0.0)
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
    world = cast("ClusterState", SimpleNamespace(telemetry=telemetry))
    status = lease.status.model_copy(update={"totals": totals(lease, [slot], world)})
    return lease.model_copy(update={"status": status})


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


def test_weights_and_what_live_traffic_met_are_added_likewise() -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    lease = _after(lease, 1000, 400, 50, weight_bytes=900, serving_requests=10, slo_violations=1)
    lease = _after(lease, 1000, 400, 50, weight_bytes=1000, serving_requests=30, slo_violations=1)
    lease = _after(lease, 5, 4, 5, weight_bytes=70, serving_requests=2, slo_violations=1)
    found = lease.status.totals
    assert (found.weight_bytes, found.serving_requests, found.slo_violations) == (1070, 32, 2)
    (entry,) = found.slots
    assert (entry.weight_bytes, entry.serving_requests, entry.slo_violations) == (70, 2, 1)
