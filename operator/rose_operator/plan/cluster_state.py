"""Objects and telemetry, judged together: the one input of planning and of every status.

Pure. ``snapshot`` translates it for the planner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rose_core.api import Desired, RolloutLease, RolloutSlot, ServingPool
from rose_core.api.rolloutslot import Tier
from rose_core.lending.tenancy import Tenancy
from rose_core.wire.routing import DemandNote
from rose_core.wire.sync import ReplicaReport
from rose_operator.plan.admission import (
    Offer,
    Parsed,
    Refusal,
    lease_refusal,
    pool_refusal,
    runs_left_out,
)
from rose_operator.plan.cluster_facts import ClusterFacts
from rose_operator.plan.telemetry import NodeTelemetry


@dataclass(frozen=True)
class ClusterState:
    """Everything known at one moment.

    Attributes:
        refusals: lease key -> why it is not accepted; ``pool_refusals`` the same for pools.
        reports: pool key -> (node, report) of its replicas.
        slots_by_lease: lease uid -> its slots, leaving ones included.
        lent_in: pool key -> uids of its replicas that are lent.
        tenancy: what the platform allows; None where it has switched that off.
        left_out: runs beside their first that leases may not follow, by key.
        asleep_in: pool key -> how many of its replicas are lent whole, leaving ones included.
        notes: lease key -> the last note of each process of its router.
        now: wall clock; ``monotonic`` is the telemetry's clock at the same moment.
    """

    pools: Parsed[ServingPool]
    leases: Parsed[RolloutLease]
    slots: Parsed[RolloutSlot]
    pool_refusals: Mapping[str, Refusal]
    refusals: Mapping[str, Refusal]
    telemetry: NodeTelemetry
    reports: Mapping[str, Sequence[tuple[str, ReplicaReport]]]
    slots_by_lease: Mapping[str, Sequence[RolloutSlot]]
    lent_in: Mapping[str, frozenset[str]]
    asleep_in: Mapping[str, int]
    tenancy: Tenancy | None
    left_out: Mapping[str, tuple[str, ...]]
    now: datetime
    monotonic: float
    notes: Mapping[str, Sequence[DemandNote]] = field(default_factory=dict)

    def slots_of(self, lease: RolloutLease) -> Sequence[RolloutSlot]:
        """The lease's slots, leaving ones included."""
        return self.slots_by_lease.get(lease.metadata.uid, ())

    def reports_of(self, pool: str) -> Sequence[tuple[str, ReplicaReport]]:
        """What agents say about the pool's replicas, with the node's name."""
        return self.reports.get(pool, ())


def observe_cluster(
    pools: Parsed[ServingPool],
    leases: Parsed[RolloutLease],
    slots: Parsed[RolloutSlot],
    telemetry: NodeTelemetry,
    *,
    cluster_facts: ClusterFacts,
    offer: Offer,
    tenancy: Tenancy | None = None,
    now: datetime,
    monotonic: float,
    notes: Mapping[str, Sequence[DemandNote]] | None = None,
) -> ClusterState:
    """Judge all objects and index them."""
    reports: dict[str, list[tuple[str, ReplicaReport]]] = defaultdict(list)
    for name, node in telemetry.nodes.items():
        for report in node.request.replicas:
            reports[report.pool].append((name, report))
    by_lease: dict[str, list[RolloutSlot]] = defaultdict(list)
    lent: dict[str, set[str]] = defaultdict(set)
    for slot in slots.good.values():
        by_lease[slot.spec.lease_ref.uid].append(slot)
        if slot.spec.desired is Desired.LENT:
            lent[slot.spec.pool_ref.key].add(slot.spec.member.pod_uid)
    whole = (slot for slot in slots.good.values() if slot.spec.tier is Tier.WHOLE)
    asleep = Counter(slot.spec.pool_ref.key for slot in whole)
    pool_refusals = {
        key: refusal
        for key, pool in pools.good.items()
        if (refusal := _judged(pool, reports.get(key, ()), cluster_facts))
    }
    refusals = {
        key: refusal
        for key, lease in leases.good.items()
        if (
            refusal := lease_refusal(
                lease, pools.good, pool_refusals, offer, now, labels=labels_of(lease, tenancy)
            )
        )
    }
    if tenancy is not None:
        # Leases that get nothing anyway count towards a namespace's caps with their router alone.
        rest = (lease for key, lease in leases.good.items() if key not in refusals)
        answers = tenancy.judge(rest, [leases.good[key] for key in refusals])
        refusals |= {key: Refusal(*answer) for key, answer in answers.items()}
    return ClusterState(
        pools=pools,
        leases=leases,
        slots=slots,
        pool_refusals=pool_refusals,
        refusals=refusals,
        telemetry=telemetry,
        reports=reports,
        slots_by_lease=by_lease,
        lent_in={key: frozenset(uids) for key, uids in lent.items()},
        asleep_in=asleep,
        tenancy=tenancy,
        left_out={
            key: left
            for key, lease in leases.good.items()
            if (left := runs_left_out(lease, offer.runs, tenancy))
        },
        now=now,
        monotonic=monotonic,
        notes=notes or {},
    )


def labels_of(lease: RolloutLease, tenancy: Tenancy | None) -> Mapping[str, str] | None:
    """Labels of the lease's namespace; None where nobody reads them."""
    return None if tenancy is None else tenancy.labels_of(lease.metadata.namespace)


def _judged(
    pool: ServingPool, reports: Sequence[tuple[str, ReplicaReport]], cluster_facts: ClusterFacts
) -> Refusal | None:
    pods = [report.pod_name for _, report in reports] if cluster_facts.autoscalers else []
    return pool_refusal(pool, cluster_facts.autoscalers, pods)


def utc(epoch_seconds: float) -> datetime:
    """Wall clock of a ``time.time()``."""
    return datetime.fromtimestamp(epoch_seconds, UTC)
