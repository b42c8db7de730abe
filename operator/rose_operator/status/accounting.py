"""Totals of leases and pools: sums of counters of agents and routers, through anybody's restarts.

``status.totals`` holds the sums *and* how much each living slot, and each process of the router,
has contributed, in one object and therefore in one write: a crash between two writes can neither
lose nor double anything. A router's process that died takes along what it had not reported yet. A
pool's ``status.totals`` does the same by node, for memory kept back while nobody borrows.
Figures move all the time, so they are written at most once a minute or with a real transition.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rose_core.api import RolloutLease, RolloutSlot, ServingPool
from rose_core.api.poolstatus import MOST_NODES, NodeReserve, PoolTotals
from rose_core.api.rolloutlease import MOST_ROUTERS, RouterTotals, SlotTotals, Totals
from rose_core.wire.routing import DemandNote
from rose_core.wire.sync import SlotReport
from rose_operator.plan.cluster_state import ClusterState

_MOST = 2**53
_LONGEST_NAME, _LONGEST_NODE = 64, 253
_CLOCKS_SECONDS = 5.0  # the API server's clock and ours
_COUNTERS = (
    "lent_milliseconds",
    "open_milliseconds",
    "reserved_milliseconds",
    "harvested_tokens",
    "weight_bytes",
    "serving_requests",
    "slo_violations",
    "serving_input_tokens",
    "serving_output_tokens",
    "serving_requests_with_tokens",
)
_OF_ROUTERS = (
    "accepted_trajectories",
    "correct_answers",
    "dedicated_tokens",
    "trained_tokens",
    "reasoning_tokens",
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
    bounded = {name: _within(value) for name, value in sums.items()}
    return Totals(slots=tuple(entries), **bounded, **_concluded(lease, world))


def pool_totals(pool: ServingPool, world: ClusterState) -> PoolTotals:
    """A pool's totals with the newest reports added."""
    old = pool.status.totals
    entries = {entry.node: entry for entry in old.nodes}
    # Replicas of one node share the counter.
    reported = {
        node: _within(report.unlent_reserved_milliseconds)
        for node, report in world.reports_of(pool.metadata.key)
        if len(node) <= _LONGEST_NODE
    }
    unlent = old.unlent_reserved_milliseconds
    gone = [name for name in entries if name not in reported]
    for node in sorted(reported):
        if node not in entries:
            if not reported[node]:
                continue
            if len(entries) >= MOST_NODES:
                if not gone:
                    continue
                del entries[gone.pop(0)]
        before = entries.pop(node, NodeReserve(node=node)).unlent_reserved_milliseconds
        unlent += reported[node] - (before if reported[node] >= before else 0)
        # It stands last, so that nodes that are gone make room first.
        entries[node] = NodeReserve(node=node, unlent_reserved_milliseconds=reported[node])
    return PoolTotals(unlent_reserved_milliseconds=_within(unlent), nodes=tuple(entries.values()))


def _concluded(lease: RolloutLease, world: ClusterState) -> dict[str, Any]:
    """What the processes of the lease's router count: tokens, and what its trainer reported."""
    old = lease.status.totals
    sums = {name: int(getattr(old, name)) for name in _OF_ROUTERS}
    entries = {entry.instance: entry for entry in old.routers}
    for note in world.notes.get(lease.metadata.key, ()):
        if not 0 < len(note.instance) <= _LONGEST_NAME or _is_older(note, lease, world):
            continue
        # A process only ever counts up; it stands last, so that those that are gone go first.
        before = entries.pop(note.instance, RouterTotals(instance=note.instance))
        counted = {name: max(getattr(before, name), count) for name, count in _counts(note).items()}
        now = RouterTotals(instance=note.instance, **counted)
        for name in _OF_ROUTERS:
            sums[name] += getattr(now, name) - getattr(before, name)
        if any(counted.values()):
            entries[note.instance] = now
    bounded = {name: _within(value) for name, value in sums.items()}
    return {**bounded, "routers": tuple(entries.values())[-MOST_ROUTERS:]}


def _counts(note: DemandNote) -> dict[str, int]:
    """The counts of a note, none above what it is a part of."""
    return {
        "accepted_trajectories": min(note.accepted, _MOST),
        "correct_answers": min(note.correct, note.accepted, _MOST),
        "dedicated_tokens": min(note.dedicated_tokens, _MOST),
        "trained_tokens": min(note.trained_tokens, _MOST),
        "reasoning_tokens": min(note.reasoning_tokens, note.trained_tokens, _MOST),
    }


def _reported(uid: str, report: SlotReport) -> SlotTotals:
    return SlotTotals(uid=uid, **{name: _within(getattr(report, name)) for name in _COUNTERS})


def _within(count: int) -> int:
    """A count that a status can hold, whatever a node says: it would end the pass for everybody."""
    return min(max(count, 0), _MOST)


def _since(counted: SlotTotals, now: SlotTotals) -> SlotTotals:
    """What the counters had come to; where one fell, their agent has begun all of them anew."""
    fell = any(getattr(now, name) < getattr(counted, name) for name in _COUNTERS)
    return SlotTotals(uid=now.uid) if fell else counted


def _is_older(note: DemandNote, lease: RolloutLease, world: ClusterState) -> bool:
    """Whether the process was there before the lease: it is that of another one of its name."""
    made = lease.metadata.creation_timestamp
    if not made:
        return False
    age = (world.now - datetime.fromisoformat(made)).total_seconds()
    return note.up_seconds > age + _CLOCKS_SECONDS
