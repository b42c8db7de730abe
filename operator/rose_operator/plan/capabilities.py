"""What nodes can do against what pools ask for: verdicts for replicas, conditions for pools (pure).

A pool that asks for MPS, for a driver limit or for elastic memory is accepted; it is its replicas
that qualify or not, node by node, with the engine host's own word why. The pool's conditions say
the same for all of them:

| condition | True | False | Unknown |
|---|---|---|---|
| ``DeviceAccess`` | every node's engine host reaches its GPUs | one does not | nobody reports |
| ``ComputeAvailable`` | ``compute`` works on every node | one cannot; names it | nobody reports |
| ``OwnershipProven`` | the kubelet allocated each replica's GPUs | found by other means | not yet |
| ``DevicesFit`` | GPUs and drivers can hold what leases ask | one cannot; figures | nobody says |
| ``MemoryAvailable`` | ``memorySource`` and ``memoryLimit`` work | one cannot | nobody reports |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from rose_core.api import ConditionType, Reason, ServingPool
from rose_core.api.conditions import Statement
from rose_core.api.reasons import MEANING, replica_refusal
from rose_core.devices.capabilities import (
    SEEN,
    Capability,
    MissingCapability,
    compute_needs,
    first_missing,
    memory_needs,
)
from rose_core.devices.ownership import Proof
from rose_core.lending import Misfit
from rose_core.wire.sync import ReplicaReport
from rose_operator.plan.cluster_state import ClusterState

_MOST_NAMED = 4
_MOST_TEXT = 200  # of one cause, so that four of them fit into a condition
# What an owner or the platform has to mend; heat, power and traffic end by themselves.
_UNFIT = frozenset(
    {
        Reason.DEVICE_ACCESS,
        Reason.DRIVER_TOO_OLD,
        Reason.DEVICE_UNKNOWN,
        Reason.NO_GPU,
        Reason.POD_UNREADABLE,
        Reason.SHARED_GPU,
        Reason.MIG_ENABLED,
        Reason.VIRTUAL_GPU,
        Reason.XID_ERROR,
        Reason.ECC_ERRORS,
        Reason.INSUFFICIENT_MEMORY,
    }
)


def needs(pool: ServingPool) -> tuple[Capability, ...]:
    """What a node must be able to do for the pool, beside plain time-slicing."""
    spec = pool.spec
    return (*compute_needs(spec.compute), *memory_needs(spec.memory_source, spec.memory_limit))


def statements(
    pool: ServingPool, world: ClusterState, misfits: Sequence[Misfit] = ()
) -> list[Statement]:
    """The pool's five conditions.

    Args:
        pool: of which they are.
        world: what agents report.
        misfits: leases whose engines none of its GPUs can hold.
    """
    spec = pool.spec
    asked = (
        (ConditionType.DEVICE_ACCESS, ()),
        (ConditionType.COMPUTE_AVAILABLE, compute_needs(spec.compute)),
        (ConditionType.MEMORY_AVAILABLE, memory_needs(spec.memory_source, spec.memory_limit)),
    )
    reports = world.reports_of(pool.metadata.key)
    available = [_statement(kind, wanted, world, reports) for kind, wanted in asked]
    return [*available, _ownership(world, reports), _fit(pool, world, misfits)]


def _fit(pool: ServingPool, world: ClusterState, misfits: Sequence[Misfit]) -> Statement:
    """Can the GPUs hold what leases ask? With the figures, so that people can act on it."""
    kind, reports = ConditionType.DEVICES_FIT, world.reports_of(pool.metadata.key)
    # A sleeper's memory is free only once it sleeps.
    bad = _UNFIT if pool.spec.whole_replica is None else _UNFIT - {Reason.INSUFFICIENT_MEMORY}
    if not reports:
        return Statement(kind, None, Reason.NO_REPLICAS, "no agent reports a replica")
    unfit = [
        (*found, node)
        for node, report in reports
        if (found := _unfit(world, node, report, bad)) is not None
    ]
    texts = [f"{len(unfit)} of {len(reports)} replicas cannot be lent"] if unfit else []
    counts = Counter(each for each, _, _ in unfit)
    ranked = sorted(counts, key=lambda each: (-counts[each], each))
    for each in ranked[:_MOST_NAMED]:
        first = next(one for one in unfit if one[0] is each)
        texts.append(f"{counts[each]} {each} ({first[2]}: {first[1][:_MOST_TEXT]})")
    named = [f"lease {one.lease}: {one.text}"[: 2 * _MOST_TEXT] for one in misfits[:_MOST_NAMED]]
    more = [f"{len(misfits) - _MOST_NAMED} more leases"] if len(misfits) > _MOST_NAMED else []
    if unfit or misfits:
        reason = ranked[0] if ranked else misfits[0].reason
        return Statement(kind, False, reason, "; ".join([*texts, *named, *more]))
    return _room(reports)


def _unfit(
    world: ClusterState, node: str, report: ReplicaReport, bad: Collection[Reason]
) -> tuple[Reason, str] | None:
    """What speaks against lending the replica's GPUs to any lease."""
    lacks = _missing(world, node, report, ())
    reason = replica_refusal(lacks.reason if lacks else report.refusal)
    if reason is None or reason not in bad:
        return None
    return reason, (lacks.text if lacks else report.refusal_text) or MEANING[reason]


def _room(reports: Sequence[tuple[str, ReplicaReport]]) -> Statement:
    """How much may be lent, where nothing stands against it."""
    kind = ConditionType.DEVICES_FIT
    rooms = [one.lendable_bytes for _, one in reports if one.lendable_bytes is not None]
    if not rooms:
        text = "no agent says how much memory may be lent"
        return Statement(kind, None, Reason.NOT_OBSERVED_YET, text)
    # Whole GiB: what serving holds moves all the time, and each change of the text is a write.
    least, most = min(rooms) >> 30, max(rooms) >> 30
    span = f"{most}" if least == most else f"{least} to {most}"
    text = f"of {len(rooms)} replicas {span} GiB per GPU may be lent"
    return Statement(kind, True, Reason.AS_EXPECTED, text)


def _ownership(world: ClusterState, reports: Sequence[tuple[str, ReplicaReport]]) -> Statement:
    """False does not stop lending: what a process list shows is still checked on every look."""
    kind = ConditionType.OWNERSHIP_PROVEN
    if not reports:
        return Statement(kind, None, Reason.NO_REPLICAS, "no agent reports a replica")
    weak = [one for one in reports if one[1].gpu_proof not in {Proof.NONE, Proof.ALLOCATED}]
    if weak:
        nodes = sorted({node for node, _ in weak})
        known = world.telemetry.nodes.get(nodes[0])
        capabilities = known.request.capabilities if known is not None else {}
        why = capabilities.get(Capability.OWNERSHIP.value, "told by other means than its kubelet")
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
        return Statement(kind, True, Reason.AS_EXPECTED, _seen(world, reports) if access else "")
    first = found[min(found)]
    names = ", ".join(sorted(found)[:_MOST_NAMED])
    text = f"{len(found)} nodes lack it ({names}): {first.text}"
    return Statement(kind, False, replica_refusal(first.reason) or Reason.OTHER, text)


def _seen(world: ClusterState, reports: Sequence[tuple[str, ReplicaReport]]) -> str:
    """Which GPUs guards see and through what, with the nodes of which that is so."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for node in sorted({node for node, _ in reports}):
        known = world.telemetry.nodes.get(node)
        if text := known.request.capabilities.get(SEEN, "") if known is not None else "":
            nodes[text[:_MOST_TEXT]].append(node)
    return "; ".join(
        f"{text} ({', '.join(names[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''})"
        for text, names in sorted(nodes.items(), key=lambda one: -len(one[1]))[:_MOST_NAMED]
    )


def _missing(
    world: ClusterState, node: str, report: ReplicaReport, wanted: tuple[Capability, ...]
) -> MissingCapability | None:
    known = world.telemetry.nodes.get(node)
    if known is None:
        return first_missing({}, wanted, report.gpu_uuids)
    return known.missing(wanted, report.gpu_uuids)
