"""The lease's totals: sums of counters that agents report, kept through restarts of anybody.

``status.totals`` holds the sums *and* how much each living slot has contributed, in one object
and therefore in one write: a crash between two writes can neither lose nor double anything.
Figures move all the time, so they are written at most once a minute or with a real transition.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose_core.api import RolloutLease, RolloutSlot
from rose_core.api.rolloutlease import SlotTotals, Totals
from rose_core.wire.sync import SlotReport
from rose_operator.plan.cluster_state import ClusterState

_COUNTERS = (
    "lent_milliseconds",
    "open_milliseconds",
    "harvested_tokens",
    "weight_bytes",
    "serving_requests",
    "slo_violations",
)


def totals(lease: RolloutLease, slots: Sequence[RolloutSlot], world: ClusterState) -> Totals:
    """Totals with the newest reports added."""
    old = lease.status.totals
    before = {entry.uid: entry for entry in old.slots}
    sums = {name: int(getattr(old, name)) for name in _COUNTERS}
    entries = []
    for slot in sorted(slots, key=lambda slot: slot.metadata.uid):
        counted = before.get(slot.metadata.uid, SlotTotals(uid=slot.metadata.uid))
        report = world.telemetry.slot(slot.metadata.uid, slot.spec.member.node)
        if report is not None:
            now = _reported(counted.uid, report)
            for name in _COUNTERS:
                sums[name] += getattr(now, name) - getattr(_since(counted, now), name)
            counted = now
        entries.append(counted)
    return Totals(slots=tuple(entries), **sums)


def _reported(uid: str, report: SlotReport) -> SlotTotals:
    return SlotTotals(uid=uid, **{name: getattr(report, name) for name in _COUNTERS})


def _since(counted: SlotTotals, now: SlotTotals) -> SlotTotals:
    """What the counters had come to; where one fell, their agent has begun all of them anew."""
    fell = any(getattr(now, name) < getattr(counted, name) for name in _COUNTERS)
    return SlotTotals(uid=now.uid) if fell else counted
