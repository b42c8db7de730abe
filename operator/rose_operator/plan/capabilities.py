"""What nodes can do against what pools ask for: verdicts for replicas, conditions for pools (pure).

A pool that asks for MPS, for a driver limit or for elastic memory is accepted; it is its replicas
that qualify or not, node by node, with the engine host's own word why. The pool's conditions say
the same for all of them:

| condition | True | False | Unknown |
|---|---|---|---|
| ``DeviceAccess`` | every node's engine host reaches its GPUs | one does not | nobody reports |
| ``ComputeAvailable`` | ``compute`` works on every node | one cannot; names it | nobody reports |
| ``OwnershipProven`` | the kubelet allocated each replica's GPUs | told otherwise | not yet |
| ``MemoryAvailable`` | ``memorySource`` and ``memoryLimit`` work | one cannot | nobody reports |
"""

from __future__ import annotations

from collections.abc import Sequence

from rose_core.api import ConditionType, Reason, ServingPool
from rose_core.api.conditions import Statement
from rose_core.api.reasons import replica_refusal
from rose_core.devices.capabilities import (
    Capability,
    Missing,
    compute_needs,
    first_missing,
    memory_needs,
)
from rose_core.devices.ownership import Proof
from rose_core.wire.sync import ReplicaReport
from rose_operator.plan.cluster_state import ClusterState

_MOST_NAMED = 4


def needs(pool: ServingPool) -> tuple[Capability, ...]:
    """What a node must be able to do for the pool, beside plain time-slicing."""
    spec = pool.spec
    return (*compute_needs(spec.compute), *memory_needs(spec.memory_source, spec.memory_limit))


def statements(pool: ServingPool, world: ClusterState) -> list[Statement]:
    """The pool's four conditions."""
    spec = pool.spec
    asked = (
        (ConditionType.DEVICE_ACCESS, ()),
        (ConditionType.COMPUTE_AVAILABLE, compute_needs(spec.compute)),
        (ConditionType.MEMORY_AVAILABLE, memory_needs(spec.memory_source, spec.memory_limit)),
    )
    reports = world.reports_of(pool.metadata.key)
    available = [_statement(kind, wanted, world, reports) for kind, wanted in asked]
    return [*available, _ownership(world, reports)]


def _ownership(world: ClusterState, reports: Sequence[tuple[str, ReplicaReport]]) -> Statement:
    """False does not stop lending: what a process list shows is still checked on every look."""
    kind = ConditionType.OWNERSHIP_PROVEN
    if not reports:
        return Statement(kind, None, Reason.NO_REPLICAS, "no agent reports a replica")
    weak = [one for one in reports if one[1].gpu_proof not in {Proof.NONE, Proof.ALLOCATED}]
    if weak:
        nodes = sorted({node for node, _ in weak})
        known = world.telemetry.nodes.get(nodes[0])
        said = known.request.capabilities if known is not None else {}
        why = said.get(Capability.OWNERSHIP.value, "told by other means than its kubelet")
        names = ", ".join(nodes[:_MOST_NAMED])
        text = f"{len(weak)} of {len(reports)} replicas ({names}): {why}"
        return Statement(kind, False, Reason.WEAKLY_PROVEN, text)
    if all(report.gpu_proof == Proof.ALLOCATED for _, report in reports):
        return Statement(kind, True, Reason.ALL_ALLOCATED)
    return Statement(kind, None, Reason.NOT_OBSERVED_YET, "some agents do not say it yet")


def _statement(
    kind: ConditionType,
    wanted: tuple[Capability, ...],
    world: ClusterState,
    reports: Sequence[tuple[str, ReplicaReport]],
) -> Statement:
    if not reports:
        return Statement(kind, None, Reason.NO_REPLICAS, "no agent reports a replica")
    access = kind is ConditionType.DEVICE_ACCESS
    found = {
        node: lacks
        for node, report in reports
        if (lacks := _missing(world, node, report, wanted))
        and (lacks.capability is Capability.DEVICE_ACCESS) == access
    }
    if not found:
        return Statement(kind, True, Reason.AS_EXPECTED)
    first = found[min(found)]
    names = ", ".join(sorted(found)[:_MOST_NAMED])
    text = f"{len(found)} nodes lack it ({names}): {first.text}"
    return Statement(kind, False, replica_refusal(first.word) or Reason.OTHER, text)


def _missing(
    world: ClusterState, node: str, report: ReplicaReport, wanted: tuple[Capability, ...]
) -> Missing | None:
    known = world.telemetry.nodes.get(node)
    if known is None:
        return first_missing({}, wanted, report.gpu_uuids)
    return known.missing(wanted, report.gpu_uuids)
