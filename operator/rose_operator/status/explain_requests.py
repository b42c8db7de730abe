"""Answers to questions that people ask by annotation (``rose explain``).

Asking through the object needs no way to the operator and no rights besides those on the object:
who may annotate a lease may ask, who may read it may read the answer.

| annotation | status.explanation | what happens |
|---|---|---|
| none | any | the answer goes with the next write of the status |
| names another request | any | answered at once |
| names the answered request | that answer | nothing |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rose_core.api import EXPLAIN_ANNOTATION, Explanation, RolloutLease, ServingPool
from rose_core.api.common import ReplicaMemory, ReplicaVerdict
from rose_core.api.conditions import timestamp
from rose_core.devices.memory import MemorySum
from rose_core.lending import LeaseDecision, ReplicaDecision
from rose_core.wire.sync import ReplicaReport
from rose_operator.plan.admission import Refusal

_MOST_VERDICTS = 512
_MOST_SUMMARY = 1024
_MOST_MESSAGE = 256
_MOST_REQUEST = 63
_MIB = 1 << 20


def is_asked(resource: ServingPool | RolloutLease) -> bool:
    """Whether a question waits for its answer."""
    request = _request(resource)
    answered = resource.status.explanation
    return bool(request) and (answered is None or answered.request != request)


def answer(
    resource: ServingPool | RolloutLease,
    summary: str,
    verdicts: Sequence[ReplicaDecision],
    now: datetime,
    reports: Iterable[tuple[str, ReplicaReport]] = (),
) -> Explanation | None:
    """What ``status.explanation`` should say now.

    Args:
        resource: that was asked about.
        summary: in one sentence.
        verdicts: of its replicas.
        now: the time of the answer.
        reports: of these replicas, for their memory.
    """
    if not _request(resource):
        return None
    if not is_asked(resource):
        return resource.status.explanation
    shown = sorted(verdicts, key=lambda one: one.replica)[:_MOST_VERDICTS]
    memory = {f"{one.pod_namespace}/{one.pod_name}": one.memory for _, one in reports}
    return Explanation(
        request=_request(resource),
        time=timestamp(now),
        summary=summary[:_MOST_SUMMARY],
        verdicts=tuple(
            ReplicaVerdict(
                replica=one.replica,
                reason=str(one.reason),
                message=one.message[:_MOST_MESSAGE],
                memory=_mebibytes(memory.get(one.replica)),
            )
            for one in shown
        ),
        omitted=len(verdicts) - len(shown),
    )


def _mebibytes(memory: MemorySum | None) -> ReplicaMemory | None:
    if memory is None:
        return None
    return ReplicaMemory(
        total=memory.total // _MIB,
        serving=memory.serving // _MIB,
        headroom=memory.headroom // _MIB,
        settled_headroom=memory.settled // _MIB,
        dormant=memory.dormant // _MIB,
    )


def lease_summary(lease: RolloutLease, outcome: LeaseDecision, refusal: Refusal | None) -> str:
    """What a lease has and why, in one sentence with its numbers."""
    if refusal is not None:
        return f"{refusal.reason}: {refusal.message}"
    spec = lease.spec
    share = f"{outcome.share} slot{'' if outcome.share == 1 else 's'}"
    return (
        f"{outcome.reason}: {outcome.message}. Priority {spec.priority}, weight {spec.weight}: "
        f"entitled to {share} of those the pool can lend now"
    )


def pool_summary(pool: ServingPool, count: int, refusal: Refusal | None) -> str:
    """What a pool's owner sees first."""
    if refusal is not None:
        return f"{refusal.reason}: {refusal.message}"
    limits = pool.spec.lending
    return (
        f"mode {pool.spec.mode}: {count} of {pool.status.replicas} replicas lent; at most "
        f"{limits.max_replicas_percent} % and all but {limits.min_unlent_replicas}"
    )


def _request(resource: ServingPool | RolloutLease) -> str:
    return resource.metadata.annotations.get(EXPLAIN_ANNOTATION, "")[:_MOST_REQUEST]
