"""Status of a ServingPool: what its agents report, and whether its objective holds."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from rose_core.api import (
    ConditionType,
    Explanation,
    PoolMode,
    PoolStatus,
    Reason,
    ServingPool,
)
from rose_core.api.conditions import Statement
from rose_core.api.names import MODEL_NAME
from rose_core.api.poolstatus import LoadShape, PoolModel
from rose_core.guard.trial import added
from rose_core.lending import LendingPlan, Misfit, PlannerPolicy
from rose_core.lending.groups import unit
from rose_core.wire.sync import MOST_MODELS, NodeModel, ReplicaReport, SignalSource, Trial
from rose_operator.plan import capabilities
from rose_operator.plan.admission import Refusal
from rose_operator.plan.cluster_state import ClusterState
from rose_operator.plan.protection import MIN_REQUESTS, Reports, finished, is_within
from rose_operator.status.accounting import pool_totals
from rose_operator.status.statuses import accepted, conditions

_C = ConditionType
_R = Reason
# Bounds of the status, whatever nodes say.
_MOST_NODES, _MOST_NAME, _MOST_DIGEST, _MOST_BYTES = 32, 128, 64, 2**53
_TAPLESS = (
    "seen by the engine's own figures, without the wire tap, so first prefills do not show, "
    "latency is not measured and nothing counts the requests a second time"
)
_NOBODY = (
    "no agent reports a replica: do pods of this namespace carry the selector's labels and none of "
    "agent-sandbox, on nodes with an agent, and does no other pool select them?"
)


def pool_status(
    pool: ServingPool,
    world: ClusterState,
    plan: LendingPlan,
    policy: PlannerPolicy,
    *,
    load: LoadShape | None = None,
    explanation: Explanation | None = None,
) -> PoolStatus:
    """Status of one pool."""
    uids = world.lent_in.get(pool.metadata.key, frozenset())
    reports = world.reports_of(pool.metadata.key)
    qualified = {
        unit(one)
        for _, one in reports
        if (found := plan.verdicts.get(one.pod_uid)) is not None
        and (one.pod_uid in uids or found.reason is _R.QUALIFIES)
    }
    stale = sum(
        world.telemetry.silence(n, world.monotonic) > policy.stale_seconds for n, _ in reports
    )
    misfits = plan.misfits.get(pool.metadata.key, ())
    statements = _pool_statements(pool, world, reports, stale, misfits)
    return PoolStatus(
        observed_generation=pool.metadata.generation,
        conditions=conditions(pool, statements, world.now),
        replicas=len({unit(one) for _, one in reports}),
        qualified_replicas=len(qualified),
        lent_replicas=lent_replicas(pool, world),
        unwanted_gpus=unwanted_gpus(pool, world, plan),
        device_classes=_classes(reports),
        models=_models(world, {node for node, _ in reports}),
        asleep_replicas=world.asleep_in.get(pool.metadata.key, 0),
        totals=pool_totals(pool, world),
        load=load,
        explanation=explanation,
    )


def lent_replicas(pool: ServingPool, world: ClusterState) -> int:
    """How many are lent; several pods of one are one."""
    reports = world.reports_of(pool.metadata.key)
    units: dict[str, str] = {report.pod_uid: unit(report) for _, report in reports}
    lent = world.lent_in.get(pool.metadata.key, frozenset())
    return len({units.get(uid, uid) for uid in lent})


def _classes(reports: Reports) -> tuple[str, ...]:
    found = {report.device_class for _, report in reports if report.device_class}
    return tuple(sorted(text[:63] for text in found)[:64])


def _models(world: ClusterState, nodes: Collection[str]) -> tuple[PoolModel, ...]:
    """What lies on these nodes, by name and content; nodes that do not say are left out."""
    models = {
        node: found
        for node in nodes
        if (known := world.telemetry.nodes.get(node)) is not None
        and (found := known.request.models) is not None
    }
    having: dict[NodeModel, list[str]] = defaultdict(list)
    named: dict[str, set[str]] = defaultdict(set)
    for node in sorted(models):
        for model in models[node][:MOST_MODELS]:
            having[model].append(node)
            named[model.name].add(node)
    shown = sorted(having, key=lambda one: (one.name, one.digest))[:MOST_MODELS]
    # A list that is full may lack what the node has.
    whole = {node for node, found in models.items() if len(found) < MOST_MODELS}
    return tuple(
        PoolModel(
            name=model.name,
            digest=model.digest[:_MOST_DIGEST],
            size_bytes=min(max(model.bytes, 0), _MOST_BYTES),
            nodes=tuple(having[model][:_MOST_NODES]),
            more_nodes=max(0, len(having[model]) - _MOST_NODES),
            missing_nodes=len(whole - named[model.name]),
        )
        for model in shown
        if re.fullmatch(MODEL_NAME, model.name) and len(model.name) <= _MOST_NAME
    )


def unwanted_gpus(pool: ServingPool, world: ClusterState, plan: LendingPlan) -> int:
    """GPUs of the pool that could be lent now and that no lease wants; 0 where nothing is lent."""
    lends = pool.spec.mode is PoolMode.LEND and pool.metadata.key not in world.pool_refusals
    return plan.unwanted.get(pool.metadata.key, 0) if lends else 0


def _pool_statements(
    pool: ServingPool,
    world: ClusterState,
    reports: Reports,
    stale: int,
    misfits: Sequence[Misfit],
) -> list[Statement]:
    refusal = world.pool_refusals.get(pool.metadata.key)
    paused = pool.spec.mode is PoolMode.PAUSED
    return [
        _pool_ready(pool, refusal, len(reports) - stale),
        accepted(refusal),
        _fresh(len(reports), stale),
        _verified([one for _, one in reports if one.place is None or not one.place.index]),
        _protected(pool, world, reports),
        _certified(pool, reports),
        *capabilities.statements(pool, world, misfits),
        Statement(_C.PAUSED, paused, _R.PAUSED_BY_OWNER if paused else _R.NOT_PAUSED),
    ]


def _pool_ready(pool: ServingPool, refusal: Refusal | None, fresh: int) -> Statement:
    if refusal is not None:
        return Statement(_C.READY, False, refusal.reason, refusal.message)
    if pool.spec.mode is PoolMode.PAUSED:
        return Statement(_C.READY, False, _R.PAUSED_BY_OWNER, "mode is Paused")
    if not fresh:
        return Statement(_C.READY, False, _R.NO_REPLICAS, _NOBODY)
    observing = pool.spec.mode is PoolMode.OBSERVE
    return Statement(_C.READY, True, _R.OBSERVE_MODE if observing else _R.LENDING_ENABLED)


def _fresh(count: int, stale: int) -> Statement:
    if not count:
        return Statement(_C.TELEMETRY_FRESH, None, _R.NO_REPLICAS, "no agent reports a replica")
    if not stale:
        return Statement(_C.TELEMETRY_FRESH, True, _R.ALL_REPLICAS_FRESH)
    text = f"{stale} of {count} replicas have no fresh telemetry"
    return Statement(_C.TELEMETRY_FRESH, False, _R.SOME_REPLICAS_STALE, text)


def _verified(reports: Sequence[ReplicaReport]) -> Statement:
    if not reports:
        return Statement(_C.SIGNAL_VERIFIED, None, _R.NO_REPLICAS)
    if all(report.verified for report in reports):
        return Statement(_C.SIGNAL_VERIFIED, True, _R.AS_EXPECTED)
    unverified = [report for report in reports if not report.verified]
    contradicted = any(report.verified is False for report in reports)
    names = ", ".join(sorted(report.pod_name for report in unverified)[:8])
    tapless = all(report.signal not in {None, SignalSource.WIRE_TAP} for report in unverified)
    reason = _R.NO_WIRE_TAP if tapless else _R.SIGNAL_NOT_VERIFIED
    text = f"{_TAPLESS if tapless else 'not verified'}: {names}"
    return Statement(_C.SIGNAL_VERIFIED, False if contradicted else None, reason, text)


def _certified(pool: ServingPool, reports: Reports) -> Statement:
    """What the next request is promised, and what lending has added, over all nodes."""
    if pool.spec.slo is None or not pool.spec.slo.ttft_milliseconds:
        return Statement(_C.LENDING_CERTIFIED, None, _R.NO_OBJECTIVE, "the pool names no TTFT")
    # Replicas of one node share its certificate, so each node counts once.
    certificates = {node: one.certificate for node, one in reports if one.certificate is not None}
    trials = [trial for trial in {node: one.trial for node, one in reports}.values() if trial]
    if not certificates:
        return Statement(_C.LENDING_CERTIFIED, None, _R.NOT_OBSERVED_YET)
    shut = [one for one in certificates.values() if not one.holds]
    worst = shut[0] if shut else max(certificates.values(), key=lambda one: one.requests)
    requests = sum(one.requests for one in certificates.values())
    exceeded = sum(one.exceeded for one in certificates.values())
    allowed = sum(one.allowed for one in certificates.values())
    text = (
        f"{worst.text}; on {len(certificates) - len(shut)} of {len(certificates)} nodes it fits; "
    )
    text += f"{exceeded} of {requests} requests took longer than promised, {allowed:.0f} may"
    harm = added(functools.reduce(Trial.plus, trials, Trial())) if trials else None
    if harm is not None:
        text += f"; {harm.text}"
    reason = _R.NOT_CERTIFIED if shut else _R.CERTIFICATE_HOLDS
    return Statement(_C.LENDING_CERTIFIED, not shut, reason, text, moving=True)


def _protected(pool: ServingPool, world: ClusterState, reports: Reports) -> Statement:
    overdue = sorted(one.pod_name for _, one in reports if one.refusal == _R.WAKE_OVERDUE)
    if overdue:
        text = f"slept for a loan and does not wake: {', '.join(overdue[:8])}"
        return Statement(_C.SERVING_PROTECTED, False, _R.WAKE_OVERDUE, text)
    if pool.spec.slo is None:
        return Statement(_C.SERVING_PROTECTED, None, _R.NO_OBJECTIVE, "the pool names no slo")
    requests, slow = finished(reports, world.telemetry)
    within = is_within(pool, requests, slow)
    if within is None:
        text = f"fewer than {MIN_REQUESTS} requests in the last minutes"
        return Statement(_C.SERVING_PROTECTED, None, _R.NOT_OBSERVED_YET, text)
    reason = _R.WITHIN_OBJECTIVE if within else _R.OBJECTIVE_MISSED
    text = f"{slow} of {requests} requests were slow, p{pool.spec.slo.percentile} is asked for"
    return Statement(_C.SERVING_PROTECTED, within, reason, text, moving=True)
