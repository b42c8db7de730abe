"""What the guard tells the operator in each ``Sync``."""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import Callable, Iterable, Mapping

from rose_agent.guard.metrics import OBSERVED
from rose_agent.guard.replicas.replica import GuardedReplica
from rose_agent.guard.slots.slot import GuardedSlot
from rose_core.api.reasons import Reason
from rose_core.devices.capabilities import SEEN, Capability
from rose_core.devices.health import DeviceRefusal
from rose_core.guard.gate import GateVerdict, closed
from rose_core.guard.ladder import Rung
from rose_core.guard.reasons import GateReason
from rose_core.guard.slot import SlotPhase
from rose_core.host_reasons import PENDING, HostReason
from rose_core.telemetry.signal import Doubt
from rose_core.wire.host import EngineState
from rose_core.wire.sync import (
    CertificateReport,
    NodeModel,
    ReplicaReport,
    SignalSource,
    SlotReport,
    SlotState,
    SyncRequest,
)

_REFUSALS: dict[GateReason, Reason] = {
    GateReason.STOP_REQUESTED: Reason.STOP_REQUESTED,
    GateReason.SERVING_GONE: Reason.SERVING_RESTARTED,
    GateReason.SERVING_SETTLING: Reason.SERVING_RESTARTED,
    GateReason.SERVING_NOT_READY: Reason.REPLICA_NOT_READY,
    GateReason.BREAKER_OPEN: Reason.BREAKER_OPEN,
}
_DOUBTS: dict[Doubt, Reason] = {
    Doubt.NO_SIGNAL: Reason.SIGNAL_MISSING,
    Doubt.STALE: Reason.TELEMETRY_STALE,
    Doubt.LOST: Reason.SIGNAL_MISSING,
    Doubt.OPAQUE: Reason.SIGNAL_MISSING,
    Doubt.UNVERIFIED: Reason.SIGNAL_NOT_VERIFIED,
    Doubt.CONTRADICTED: Reason.SIGNAL_NOT_VERIFIED,
}
# Words whose texts hold no figure that moves: degrees and watts would be news in every report.
_STEADY = frozenset(DeviceRefusal) - {DeviceRefusal.THERMAL, DeviceRefusal.POWER}
_FRESH_NS = 10_000_000_000


def sync_request(
    node: str,
    highest_term: int,
    replicas: Iterable[tuple[GuardedReplica, GateVerdict | None]],
    slots: Iterable[GuardedSlot],
    *,
    host_alive: bool,
    capabilities: Mapping[str, str],
    models: tuple[NodeModel, ...] | None = None,
    guard: str = "",
    sleepless: Callable[[GuardedReplica], Reason | None] = lambda _: None,
) -> SyncRequest:
    """The report of this node to the operator; a replica without a verdict is unknown.

    ``guard`` is where other nodes' guards may ask this one; ``sleepless`` says why a replica does
    not sleep for a loan, or does not serve yet after one.
    """
    now_ns = time.monotonic_ns()
    unknown = closed(GateReason.SIGNAL_MISSING)
    reports = [slot_report(slot) for slot in slots]
    seen = tuple(
        replica_report(
            replica,
            verdict or unknown,
            now_ns,
            host_alive=host_alive,
            sleep_refusal=sleepless(replica),
        )
        for replica, verdict in replicas
    )
    OBSERVED.keep({(one.pool, f"{one.pod_namespace}/{one.pod_name}") for one in seen})
    return SyncRequest(
        node=node,
        agent_version=_version(),
        highest_term=highest_term,
        replicas=seen,
        slots=tuple(one for one in reports if one is not None),
        capabilities={
            **capabilities,
            "EngineHost": "" if host_alive else "the engine host does not answer",
        },
        models=models,
        guard=guard,
    )


def capabilities(
    host: Mapping[str, str], device_absence: str, device_summary: str, weakness: str = ""
) -> dict[str, str]:
    """What the host says, with the guard's own words: which GPUs, or why none, and whose.

    Where the guard sees no GPU it says why; what the host then lacks follows from that.
    """
    texts = dict(host)
    if device_summary:
        texts[SEEN] = device_summary
    if weakness:
        texts[Capability.OWNERSHIP.value] = weakness
    if device_absence:
        texts[Capability.DEVICE_ACCESS.value] = f"{Reason.DEVICE_ACCESS.value}: {device_absence}"
    return texts


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("rose-gpu")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _busy_permille(replica: GuardedReplica, source: SignalSource | None, now_ns: int) -> int | None:
    """Share of the time since the last report with a request under way, also for `rose advise`.

    Unknown while there is no source, and once after another one has taken over: what two sources
    have counted cannot be subtracted.
    """
    counters, name = replica.outcomes.counters, f"{replica.pod.namespace}/{replica.pod.name}"
    before, since_ns, same = counters.busy_ns, counters.asked_ns, source is counters.busy_of
    counters.busy_of = source or counters.busy_of
    counters.busy_ns, counters.asked_ns = replica.busy_ns(counters.busy_of, now_ns), now_ns
    elapsed = now_ns - since_ns
    if source is None or not same or not since_ns or elapsed <= 0:
        return None
    busy = counters.busy_ns - before
    OBSERVED.add(replica.pod.pool, name, busy / 1e9, elapsed / 1e9)
    return min(1000, round(1000 * busy / elapsed))


def replica_report(
    replica: GuardedReplica,
    verdict: GateVerdict,
    now_ns: int,
    *,
    host_alive: bool,
    sleep_refusal: Reason | None = None,
) -> ReplicaReport:
    """The report of one serving replica.

    Args:
        replica: as the guard knows it.
        verdict: of its gate, the last one.
        now_ns: CLOCK_MONOTONIC.
        host_alive: the engine host of this node answers.
        sleep_refusal: why it does not sleep for a loan, or does not serve yet after one.
    """
    signal, view = replica.signal(now_ns), replica.view
    pod, counters = replica.pod, replica.outcomes.counters
    source = replica.lasting_source(now_ns)
    refusal, text = _refusal(
        replica,
        verdict,
        None if source is not None or pod.follows else signal.doubt,
        host_alive=host_alive,
        sleep_refusal=sleep_refusal,
    )
    return ReplicaReport(
        pool=pod.pool,
        pod_namespace=pod.namespace,
        pod_name=pod.name,
        pod_uid=pod.uid,
        gpu_uuids=pod.gpu_uuids,
        gpu_proof=pod.claim.proof.value,
        ready=pod.ready,
        stopped=verdict.reason is GateReason.STOP_REQUESTED,
        signal=source,
        verified=replica.verification.verified,
        refusal=refusal.value if refusal else "",
        refusal_text=text,
        running_requests=signal.running,
        kv_used_permille=kv_permille(replica, now_ns),
        busy_permille=_busy_permille(replica, signal.source, now_ns),
        lendable_bytes=view.lendable.bytes if view is not None else None,
        lendable_text=view.lendable.message if view is not None else "",
        memory=view.lendable.parts if view is not None else None,
        device_class=view.device_class if view is not None else "",
        requests_total=counters.finished,
        slow_requests_total=counters.slow,
        certificate=_certificate(replica),
        trial=replica.outcomes.pool.trial if replica.outcomes.pool.trial.lent else None,
        place=pod.place,
        unlent_reserved_milliseconds=replica.outcomes.pool.unlent_reserved_ns // 1_000_000,
    )


def _certificate(replica: GuardedReplica) -> CertificateReport | None:
    certificate, count = replica.outcomes.experience.last_certificate, replica.outcomes.certified
    if certificate is None:
        return None
    return CertificateReport(
        certificate.holds, certificate.text, count.requests, count.exceeded, round(count.allowed, 2)
    )


def kv_permille(replica: GuardedReplica, now_ns: int) -> int | None:
    """KV use from the freshest source that tells it."""
    known = [
        r
        for r in replica.readings.values()
        if r.figures.kv_permille is not None and now_ns - r.read_ns < _FRESH_NS
    ]
    return max(known, key=lambda r: r.read_ns).figures.kv_permille if known else None


def slot_report(slot: GuardedSlot) -> SlotReport | None:
    """One slot; None when there is nothing to say about it."""
    status, totals = slot.status, slot.totals
    if slot.grant is not None:
        key = slot.grant.key.slot
    elif status is not None:
        key = status.slot
    else:
        return None
    return SlotReport(
        slot=key,
        state=slot_state(slot),
        reason=slot_reason(slot),
        message=(status.message if status and status.message else slot.message),
        gate_open=slot.gate_open,
        endpoint=status.endpoint if status else "",
        version=status.version if status else "",
        digest=status.digest if status else "",
        adapters=status.adapters if status else (),
        lent_milliseconds=totals.lent_ns // 1_000_000,
        open_milliseconds=totals.open_ns // 1_000_000,
        reserved_milliseconds=totals.reserved_ns // 1_000_000,
        harvested_tokens=totals.tokens,
        weight_bytes=totals.weight_bytes,
        serving_requests=totals.requests,
        slo_violations=totals.violations,
        serving_input_tokens=totals.input_tokens,
        serving_output_tokens=totals.output_tokens,
        serving_requests_with_tokens=totals.with_tokens,
        reclaims=dict(totals.reclaims),
        needs_bytes=status.needs_bytes if status else None,
    )


def slot_reason(slot: GuardedSlot) -> str:
    """The host's reason for the engine's state; the gate's where the host has nothing to add."""
    reason = slot.status.reason if slot.status else HostReason.NONE
    return slot.verdict.reason.value if reason in PENDING else reason.value


def _refusal(
    replica: GuardedReplica,
    verdict: GateVerdict,
    doubt: Doubt | None,
    *,
    host_alive: bool,
    sleep_refusal: Reason | None,
) -> tuple[Reason | None, str]:
    """Why nothing may be lent of a replica, and what is said with it: the first reason that holds.

    In this order: what it does for a loan of all of it, its place in a group, its gate, its signal,
    the engine host, its GPUs, their memory.
    """
    spans = Reason.MULTI_NODE_REPLICA if replica.unplaced else None
    early = sleep_refusal or spans or _REFUSALS.get(verdict.reason)
    if early is not None:
        return early, ""
    if doubt is not None:
        return _DOUBTS[doubt], ""
    if not host_alive:
        return Reason.ENGINE_HOST_UNAVAILABLE, ""
    view = replica.view
    if view is not None and view.refusal:
        return Reason(view.refusal), view.message if view.refusal in _STEADY else ""
    if not replica.pod.gpu_uuids:
        return Reason.NO_GPU, replica.pod.claim.message
    return (Reason.INSUFFICIENT_MEMORY, "") if replica.full else (None, "")


def slot_state(slot: GuardedSlot) -> SlotState:
    """The slot's state, as the operator names it."""
    status, machine = slot.status, slot.machine
    if machine.phase is SlotPhase.RELEASING or (status and status.state is EngineState.STOPPING):
        return SlotState.RELEASING
    if status is None or status.state is EngineState.GONE:
        return SlotState.PENDING if slot.grant else SlotState.GONE
    if status.state is EngineState.FAILED:
        return SlotState.FAILED
    if status.state is EngineState.STARTING:
        return SlotState.STARTING
    dormant = status.state is EngineState.DORMANT
    if not status.version and not dormant:
        return SlotState.SYNCING
    running = machine.rung is Rung.NONE and not dormant
    return SlotState.RUNNING if running else SlotState.STOPPED
