"""Builders of planner snapshots; replicas are fit and settled unless a test says otherwise."""

from dataclasses import replace
from typing import Any

from rose_core.api import Reason
from rose_core.identity import LeaseUid, PodUid, SlotUid
from rose_core.lending import (
    Lease,
    PlannerMemory,
    PlannerPolicy,
    PoolTerms,
    Replica,
    Slot,
    Snapshot,
    plan,
)

NOW = 1_800_000_000.0
POLICY = PlannerPolicy()
ALL_SIGNALS = frozenset({"WireTap", "Loads"})


def pool(**changes: Any) -> PoolTerms:  # noqa: ANN401  # any field
    return replace(PoolTerms("s/chat", 100, 0, ALL_SIGNALS), **changes)


def replica(name: str, **changes: Any) -> Replica:  # noqa: ANN401  # any field
    made = Replica(
        uid=PodUid(name),
        name=f"s/{name}",
        node=f"node-{name}",
        pool="s/chat",
        gpus=(f"GPU-{name}",),
        ready=True,
        stopped=False,
        signal="WireTap",
        verified=True,
        kv_permille=100,
    )
    return replace(made, **changes)


def lease(name: str, **changes: Any) -> Lease:  # noqa: ANN401  # any field
    return replace(
        Lease(f"r/{name}", LeaseUid(f"uid-{name}"), "s/chat", 0, NOW - 1000, 1, 1), **changes
    )


def slot(of: Lease, on: Replica, **changes: Any) -> Slot:  # noqa: ANN401  # any field
    made = Slot(
        name=f"{of.uid}-{on.uid}",
        uid=SlotUid(f"slot-{of.uid}-{on.uid}"),
        lease=of.key,
        lease_uid=of.uid,
        pool=of.pool,
        node=on.node,
        replica=on.uid,
        gpus=on.gpus,
        created=NOW - 500,
    )
    return replace(made, **changes)


def world(
    replicas: list[Replica],
    leases: list[Lease],
    slots: list[Slot] | None = None,
    pools: list[PoolTerms] | None = None,
    **changes: Any,  # noqa: ANN401  # any field
) -> Snapshot:
    """Replicas have settled long ago unless the test says otherwise."""
    made = Snapshot(
        pools=tuple([pool()] if pools is None else pools),
        replicas=tuple(replicas),
        leases=tuple(leases),
        slots=tuple(slots or ()),
        silence={one.node: 60.0 if one.stale else 1.0 for one in replicas},
        reporting=frozenset(one.node for one in replicas),
        memory=PlannerMemory(fit_since={one.uid: NOW - 1000 for one in replicas}),
    )
    return replace(made, **changes)


def lent(snapshot: Snapshot, now: float = NOW) -> list[tuple[str, str]]:
    return [(one.lease, one.replica) for one in plan(snapshot, now).lends]


def released(snapshot: Snapshot, now: float = NOW) -> dict[str, Reason]:
    return {one.slot: one.reason for one in plan(snapshot, now).releases}
